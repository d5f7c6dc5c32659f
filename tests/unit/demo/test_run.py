from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_grpo.demo.run import run_smollm2, run_tiny
from hpc_grpo.run.paths import RunDir
from tests.support.command import call


class FakeTrainings:
    """Stand in for `hpc-grpo train`: leave what a complete run leaves, or nothing and an exit code."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        self.configs: list[str] = []
        self.settings: list[dict[str, str]] = []

    def run(self, command: Sequence[str]) -> int:
        assert list(command[:4]) == [sys.executable, "-m", "hpc_grpo.cli", "train"]
        self.configs.append(command[4])
        self.settings.append(dict(word.split("=", 1) for word in command[5:]))
        if not self.exit_code:
            self._leave(RunDir(Path(self.settings[-1]["run.root"]) / self.settings[-1]["run.name"]))
        return self.exit_code

    def _leave(self, run: RunDir) -> None:
        run.create()
        assert not run.metrics.exists(), "begins anew"
        lines = [{"step": step, "attempt": 1, "eval/pass@1": 0.2 + step / 10} for step in (0, 5)]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.exports / "step_5").mkdir(parents=True)
        run.complete_marker.touch()


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> FakeTrainings:
    trainings = FakeTrainings()
    monkeypatch.setattr("hpc_grpo.demo.run.run_in_foreground", trainings.run)
    monkeypatch.setattr("hpc_grpo.demo.smollm2.write_smollm2", lambda _folder: None)
    return trainings


def test_the_pretrained_model_is_trained_anew_and_its_gain_told(
    trainings: FakeTrainings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        run_smollm2(tmp_path, "demo_long", 3, ["train.total_steps=5"])
    assert trainings.configs == ["local/demo_long"] * 2
    assert trainings.settings[0] == trainings.settings[1]
    assert trainings.settings[0] == {
        "run.root": f"{tmp_path}/runs",
        "run.name": "demo-long",
        "run.seed": "3",
        "model.path": f"{tmp_path}/smollm2",
        "train.total_steps": "5",
    }
    shown = capsys.readouterr().out
    assert "Seed 3, held out: pass@1 0.200 before, 0.700 after (+50.0 points)" in shown
    assert f"hpc-grpo status --why {tmp_path}/runs/demo-long " in shown


def test_the_tiny_model_is_warm_started_and_its_export_trained(trainings: FakeTrainings, tmp_path: Path) -> None:
    run_tiny(tmp_path, 0, ["train.total_steps=5"])
    assert trainings.configs == ["local/tiny_sft", "local/tiny_grpo"]
    warm_start, grpo = trainings.settings
    assert Path(warm_start["data.train.path"]).is_file()
    assert "train.total_steps" not in warm_start
    assert grpo["model.path"] == f"{tmp_path}/runs/tiny-sft/export/step_5"
    assert Path(grpo["data.eval.path"]).is_file()
    assert grpo["train.total_steps"] == "5"


def test_a_training_that_fails_ends_the_demo_with_its_exit_code(trainings: FakeTrainings, tmp_path: Path) -> None:
    trainings.exit_code = 75
    done = call("demo", "--folder", str(tmp_path))
    assert done.exit_code == 75
    assert f"hpc-grpo status --why {tmp_path}/runs/demo" in done.stderr


@pytest.mark.parametrize("name", ["demo", "demo_long"])
def test_what_is_trained_on_is_made_with_another_seed_than_what_is_held_out(name: str) -> None:
    from hpc_grpo.config import load_config

    data = load_config(f"local/{name}").data
    assert data.eval is not None
    assert data.deduplicate
    trained, held_out = (
        {(source.path, source.args.get("seed", 0)) for source in part.mix or [part]} for part in (data.train, data.eval)
    )
    assert {path for path, _ in trained} == {path for path, _ in held_out}
    assert trained.isdisjoint(held_out)
