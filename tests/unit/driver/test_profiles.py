"""Which steps are profiled and what is written, with futures in the place of Ray's references."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from hpc_grpo.driver import telemetry
from hpc_grpo.driver.telemetry import Profiles
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir
from tests.support.ray_futures import FakeRay, answered


class FakeStackProfile:
    def stop(self) -> bytes:
        return b"<html>"


class FakeActor:
    """An actor whose calls are noted, and answered with its files or with its death."""

    def __init__(self, files: dict[str, bytes] | Exception, started: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._files, self._started = files, started

    def __getattr__(self, method: str) -> Any:
        def remote() -> Any:
            self.calls.append(method)
            return answered(self._started if method == "start_profile" else self._files)

        return SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "ray", FakeRay())
    monkeypatch.setattr(telemetry, "StackProfile", FakeStackProfile)


def written(run_dir: RunDir) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir.path)): path.read_bytes() for path in run_dir.path.rglob("steps_*/*")}


def take(asked: Profiles, *steps: int) -> None:
    for step in steps:
        asked.before(step)
        asked.after(step)


def test_the_first_learner_engine_and_the_driver_are_profiled_from_the_first_step_to_the_last(run_dir: RunDir) -> None:
    learner, engine = FakeActor({"trace.json.gz": b"L"}), FakeActor({"stacks.html": b"E"})
    asked = Profiles(run_dir, (3, 4), learner, SimpleNamespace(actor=engine))
    take(asked, 1, 2)
    assert learner.calls == []
    take(asked, 3)
    assert learner.calls == engine.calls == ["start_profile"]
    take(asked, 4, 5)
    asked.close()
    assert learner.calls == engine.calls == ["start_profile", "stop_profile"]
    assert written(run_dir) == {
        "profiles/steps_3_4/driver-0.stacks.html": b"<html>",
        "profiles/steps_3_4/learner-0.trace.json.gz": b"L",
        "profiles/steps_3_4/engine-0.stacks.html": b"E",
    }


def test_a_run_that_resumes_or_ends_between_the_steps_profiles_those_that_it_takes(run_dir: RunDir) -> None:
    learner = FakeActor({"trace.json.gz": b"L"})
    asked = Profiles(run_dir, (3, 9), learner)
    take(asked, 5, 6)
    asked.close()
    asked.close()
    assert learner.calls == ["start_profile", "stop_profile"]
    assert "profiles/steps_3_9/learner-0.trace.json.gz" in written(run_dir)
    take(asked, 10)
    assert learner.calls == ["start_profile", "stop_profile"]


def test_an_environment_without_the_sampler_is_a_configuration_error(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"metrics\.profile_steps needs pyinstrument"):
        Profiles(run_dir, (1, 2), FakeActor({}))


def test_an_engine_that_died_meanwhile_costs_its_own_profile_alone(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = SimpleNamespace(actor=FakeActor(ActorDiedError()))
    take(Profiles(run_dir, (1, 1), FakeActor({"trace.json.gz": b"L"}), engine), 1)
    assert {Path(path).name for path in written(run_dir)} == {"driver-0.stacks.html", "learner-0.trace.json.gz"}
    assert "engine-0 could not be profiled" in capsys.readouterr().out


def test_one_that_could_not_begin_is_not_asked_for_what_it_has_not(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = FakeActor({"trace.json.gz": b"L"})
    engine = FakeActor({"stacks.html": b"E"}, started=RuntimeError("Profiler is already active"))
    take(Profiles(run_dir, (1, 1), learner, SimpleNamespace(actor=engine)), 1)
    assert (learner.calls, engine.calls) == (["start_profile", "stop_profile"], ["start_profile"])
    assert {Path(path).name for path in written(run_dir)} == {"driver-0.stacks.html", "learner-0.trace.json.gz"}
    assert capsys.readouterr().out.count("engine-0 could not be profiled") == 1
