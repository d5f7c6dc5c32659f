"""What the supervisor keeps of a driver's last words; real drivers, on nodes that do nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.launch.supervisor import supervisor
from hpc_grpo.launch.supervisor.supervisor import Supervisor
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.signals import Signals
from tests.support.places import FakePlace

A_BUG = "raise RuntimeError('a bug that every start meets')"


class NodesInRay:
    def head_environment(self) -> dict[str, str]:
        return {}

    def sources(self) -> list[int]:
        return []

    def advance(self) -> None: ...

    def lost(self) -> dict[str, str]:
        return {}


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sees programs through as drivers, one for each start; gives the record of the attempt."""
    monkeypatch.setattr(supervisor, "_SETTLE_S", 0.0)
    place = FakePlace()
    formation = SimpleNamespace(nodes=NodesInRay(), allocation=place.allocation(), was_formed_again=False)
    monkeypatch.setattr(supervisor, "Formation", lambda *_: formation)

    def see_through(*programs: str) -> Any:
        config = load_config("local/debug", [f"launch.max_stalled_restarts={len(programs) - 1}"])
        begun = tmp_path / "begun"
        begun.touch()
        program = (
            f"from pathlib import Path\nbegun = Path({str(begun)!r})\nn = len(begun.read_text())\n"
            f"begun.write_text('x' * (n + 1))\nexec({programs!r}[n])"
        )
        one = Supervisor(RunDir(tmp_path / "run"), config, place, [sys.executable, "-c", program], tmp_path)
        one.record.ray_address = "10.0.0.1:1"
        one._dir.mkdir(parents=True)
        with Signals() as one._signals:
            one._driver = one._start_driver()
            one._see_driver_through()
        one._driver.close(1.0)
        return one.record

    return see_through


def test_the_record_says_what_the_driver_died_of(supervised: Any) -> None:
    record = supervised(A_BUG, A_BUG)
    why = "The driver crashed with exit code 1: RuntimeError: a bug that every start meets; see driver.log."
    assert (record.exit_kind, record.why, record.restarts) == ("crash", why, [why])


def test_what_an_earlier_start_died_of_is_not_said_of_the_last(supervised: Any) -> None:
    record = supervised(A_BUG, "raise SystemExit(3)")
    assert "a bug" in record.restarts[0]
    assert record.why == "The driver crashed with exit code 3; see driver.log."


def test_a_configuration_that_is_rejected_is_said_in_its_own_words(supervised: Any) -> None:
    record = supervised("print('error: model.path = m is\\n  no model.'); raise SystemExit(78)")
    assert record.exit_kind == "config"
    assert record.why == "Something must be changed first: model.path = m is no model; see driver.log."
