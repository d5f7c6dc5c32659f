"""The package as a script or a notebook uses it: the blocks of docs/python.md, resumed runs, comparisons, functions."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import hpc_grpo
from hpc_grpo.config import load_config
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.run.chain import ChainRecord, write_chain
from hpc_grpo.run.frozen_config import take_inputs
from hpc_grpo.run.paths import RunDir
from tests.support.command import call
from tests.support.places import FakeQueue
from tests.support.run_builder import RunBuilder

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "docs" / "python.md").read_text(), re.M | re.S)
CONFIG = """
run: {name: my-run}
model: {path: org/model, device: cpu}
data: {train: {path: org/rows}, eval: {path: org/held_out}, max_prompt_tokens: 64}
rewards: [{name: correctness}]
engine: {engines_per_node: 1}
train: {total_steps: 2}
eval: {every: 1 steps}
"""


class FinishingQueue(FakeQueue):
    """Runs every job to its end at once."""

    def submit(self, request: JobRequest) -> str:
        request.run.complete_marker.write_text("done\n")
        return super().submit(request)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config and two runs of it, the second with another learning rate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpc_grpo.api.job_queue", FinishingQueue)
    monkeypatch.setattr("hpc_grpo.cli.train.refuse_unknown_models", lambda *_args: None)  # the hub has no org/model
    (tmp_path / "my_run.yaml").write_text(CONFIG)
    write_run("my-run", solved=(True, True, False, False))
    write_run("other", "train.lr=3e-6", solved=(True, True, True, False))
    return tmp_path


def write_run(
    name: str, *overrides: str, solved: Sequence[bool | None] = (True,), prompt: str = "p", num_samples: int = 1
) -> RunDir:
    """A complete run of two steps, in two attempts: the first one lost its step 2."""
    run = freeze(load_config("my_run.yaml", [f"run.name={name}", *overrides]), [], [])
    lines = [line(1, 0, **{"eval/pass@1": 0.0}), line(1, 1), line(1, 2, **{"reward/mean": 9.0})]
    shares = [each for each in solved if each is not None]
    of_eval = {"eval/pass@1": sum(shares) / len(shares), "eval/pass@1_low": 0.1, "eval/pass@1_high": 0.9}
    write_lines(run.metrics, [*lines, line(2, 2, **of_eval)])
    shown = {"source": "s", "prompt": prompt, "completion": "c", "answer": "1"}
    for step in (1, 2, 3):  # step 3 is left over from the first attempt
        graded = [{"ordinal": 0, "sample": at, "reward": float(at), **shown} for at in range(2)]
        write_lines(run.rollouts(step), graded)
    for step in (0, 2):
        evals = [
            {"ordinal": at, "sample": sample, "reward": None if each is None else float(each), "solved": each, **shown}
            for at, each in enumerate(solved)
            for sample in range(num_samples)
        ]
        write_lines(run.eval_rollouts(step), evals)
    run.complete_marker.write_text("done\n")
    return run


def line(attempt: int, step: int, **metrics: float) -> dict[str, Any]:
    return {"attempt": attempt, "step": step, **({"reward/mean": step / 2} if step else {}), **metrics}


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda text: text.splitlines()[0])
def test_a_block_of_the_page_runs(
    block: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpc_grpo.api.run_until_over", lambda command: 0)
    monkeypatch.setattr("hpc_grpo.cli.submit.refuse_what_fails", lambda configs, accepts_changes: None)
    (folder / "train.py").write_text(block)
    names = {"__name__": "__main__"}
    monkeypatch.setitem(sys.modules, "__main__", module := type(sys)("__main__"))
    module.__dict__.update(names, __file__=str(folder / "train.py"))
    exec(compile(block, "train.py", "exec"), module.__dict__)
    assert capsys.readouterr().out


def test_the_cells_of_the_notebook_run_one_after_the_other(folder: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    cells = json.loads((REPOSITORY / "examples" / "results.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile(cell, "results.ipynb", "exec"), names)
        pyplot.close("all")  # as a notebook does
    assert names["held_out"]["solved"].tolist() == [True, True, False, False]
    assert [line.get_ydata().tolist() for line in names["axes"].lines] == [[0.0, 0.5]]
    assert names["both"].differences["other - my-run"]["eval/pass@1"] == 0.25


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import sys, hpc_grpo; print(sorted({'torch', 'ray', 'pandas', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_resumed_run_gives_each_step_once(folder: Path) -> None:
    run = hpc_grpo.Run("my-run")
    assert run.metrics()["reward/mean"].to_dict() == pytest.approx({0: math.nan, 1: 0.5, 2: 1.0}, nan_ok=True)
    assert run.evals()["pass@1"].to_dict() == {0: 0.0, 2: 0.5}
    assert run.rollouts()["step"].tolist() == [2, 2]
    with pytest.raises(ConfigError, match="step = 3: run my-run has completions of these steps: 1, 2"):
        run.rollouts(step=3)


def test_two_runs_differ_by_a_key_and_by_pairs_of_prompts(folder: Path) -> None:
    found = hpc_grpo.compare(["runs/my-run", "runs/other"])
    assert found.config == {"train.lr": (1e-6, 3e-6)}
    assert found.results["eval/pass@1"] == (0.5, 0.75)
    apart = found.differences["other - my-run"]
    assert apart["eval/pass@1"] == 0.25
    assert apart["eval/pass@1_low"] < 0.25 < apart["eval/pass@1_high"]
    result = call("compare", "my-run", "other")
    assert re.search(r"^train\.lr +1e-06 +3e-06$", result.stdout, re.M)
    assert "0.500 [0.100, 0.900]" in result.stdout
    assert json.loads(call("compare", "my-run", "other", "--json").stdout)["differences"] == found.differences


@pytest.mark.parametrize(
    ("eval_of_third", "note"),
    [
        ({"prompt": "another"}, "differ, so they cannot be paired"),
        ({"num_samples": 2}, "eval.num_samples differs"),
        ({"prompt": "another", "num_samples": 2}, "differ, so they cannot be paired"),
    ],
)
def test_runs_with_other_evals_are_not_paired(folder: Path, eval_of_third: dict[str, Any], note: str) -> None:
    write_run("third", **eval_of_third)
    found = hpc_grpo.compare(["my-run", "third"])
    assert found.differences == {} and note in str(found)


def test_a_prompt_whose_reward_failed_is_in_no_pair(folder: Path) -> None:
    write_run("third", solved=(None, True, True, False))
    assert hpc_grpo.compare(["my-run", "third"]).differences["third - my-run"]["eval/pass@1"] == pytest.approx(1 / 3)


def test_evals_before_a_change_of_eval_num_samples_are_compared_as_they_were_sampled(folder: Path) -> None:
    overrides = ["eval.num_samples=1"]  # as resumes set them, after evals of 3 completions
    write_run("third", *overrides, solved=(True, False), num_samples=3)
    write_run("fourth", *overrides, solved=(True, True), num_samples=3)
    assert hpc_grpo.compare(["third", "fourth"]).differences["fourth - third"]["eval/pass@1"] == 0.5


def test_a_reward_whose_file_changed_between_two_runs_is_a_difference(folder: Path) -> None:
    (folder / "scores.py").write_text("def own(completions, **columns): return [0.2 for _ in completions]")
    runs = [write_run(name, "rewards=[{name: scores.py:own}]") for name in ("third", "fourth")]
    assert hpc_grpo.compare(["third", "fourth"]).config == {}
    for run, digest in zip(runs, ("sha256 a", "sha256 b"), strict=True):
        take_inputs(run, {"rewards.0.name": {"scores.py": digest}, "data.train.path": {"rows.jsonl": digest}})
    found = hpc_grpo.compare(["third", "fourth"])
    assert found.config == {"rewards.0.name: scores.py": ("sha256 a", "sha256 b")}


def test_a_run_is_not_compared_with_itself(folder: Path) -> None:
    with pytest.raises(ConfigError, match="A run is given twice"):
        hpc_grpo.compare(["my-run", "runs/my-run"])


def test_one_run_is_no_comparison(folder: Path) -> None:
    with pytest.raises(ConfigError, match="1 runs: a comparison needs two or more"):
        hpc_grpo.compare(["my-run"])


@pytest.mark.parametrize(
    "function", [lambda prompts, completions: [], FakeQueue.submit, call], ids=["lambda", "method", "top"]
)
def test_a_function_without_a_file_of_its_own_is_refused(folder: Path, function: Any, monkeypatch: Any) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr("hpc_grpo.api.run_until_over", lambda command: commands.append(command) or 0)
    if function is call:
        hpc_grpo.train("my_run.yaml", rewards=[function, "math"])
        (override,) = [word for word in commands[0] if word.startswith("rewards=")]
        first, second = json.loads(override.partition("=")[2])
        assert first["name"].endswith("tests/support/command.py:call") and second["name"] == "math"
    else:
        with pytest.raises(ConfigError, match=r"at the top of a \.py file"):
            hpc_grpo.train("my_run.yaml", rewards=[function])


@pytest.mark.parametrize(("code", "kind"), [(78, ConfigError), (1, LaunchError), (69, LaunchError)])
def test_training_that_fails_raises(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type) -> None:
    monkeypatch.setattr("hpc_grpo.api.run_until_over", lambda command: code)
    with pytest.raises(kind, match=f"exit code {code}"):
        hpc_grpo.train("my_run.yaml")


def test_training_that_fails_before_an_attempt_does_not_give_the_reason_of_an_earlier_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = RunBuilder.of(RunDir(folder / "runs" / "my-run"))
    built.attempt(1, "config", why="an old reason", exit_code=78)
    monkeypatch.setattr("hpc_grpo.api.run_until_over", lambda command: 78)
    with pytest.raises(ConfigError, match=r"printed above\.$"):
        hpc_grpo.train("my_run.yaml")
    monkeypatch.setattr(
        "hpc_grpo.api.run_until_over", lambda command: built.attempt(2, "config", why="a new reason") and 78
    )
    with pytest.raises(ConfigError, match="a new reason"):
        hpc_grpo.train("my_run.yaml")


def test_a_text_with_half_of_a_surrogate_pair_is_in_the_table(folder: Path) -> None:
    run = RunDir(folder / "runs" / "my-run")
    write_lines(run.rollouts(2), [{"ordinal": 0, "completion": "a\ud83db", "reward": 0.5}])
    assert hpc_grpo.Run("my-run").rollouts().to_dict("records") == [
        {"step": 2, "ordinal": 0, "completion": "a?b", "reward": 0.5}
    ]


def test_a_file_that_trains_when_it_is_imported_is_told_to_guard_the_call(folder: Path) -> None:
    (folder / "unguarded.py").write_text("import hpc_grpo\nhpc_grpo.train('my_run.yaml')\n")
    result = call("reward", "test", "unguarded.py:f", "--prompt", "p", "--completion", "c")
    assert result.exit_code == 78 and 'if __name__ == "__main__":' in result.stderr


def test_waiting_ends_where_the_run_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run("failed")
    run.complete_marker.unlink()
    write_chain(run, ChainRecord().with_link("7"))
    run.stop_marker.touch()
    assert hpc_grpo.api.Job("7", hpc_grpo.Run("failed")).wait().status.state == "stopped"
    run.stop_marker.unlink()
    monkeypatch.setattr("hpc_grpo.api._LOOK_S", 0.0)
    with pytest.raises(TimeoutError, match="failed is submitted after 0 s"):
        hpc_grpo.api.Job("7", hpc_grpo.Run("failed")).wait(timeout_s=0.0)
