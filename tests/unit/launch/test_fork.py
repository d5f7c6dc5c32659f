"""`hpc-grpo fork`: what the new run has, what it refuses, and that the other run stays as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import Result

from hpc_grpo.config import Config, load_config, with_overrides
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.launch import fork as forking
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.report.page import run_data
from hpc_grpo.run.checkpoint import Manifest, hash_files, prune_checkpoints, valid_checkpoints, write_manifest
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import differences, read_config, read_inputs, take_inputs, write_config
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import CELLS, RunDir
from hpc_grpo.run.progress import MetricColumns, read_metrics
from tests.support.command import call

STEPS = [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2)]
"""(step, attempt): the second attempt trained step 3 again."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 2 and 4."""
    words = ["model.path=org/m", "data.train.path=org/rows", "eval.every=null", f"run.root={tmp_path}"]
    run = freeze(load_config("local/debug", words), [], [])
    run.ledger.write_text("".join(json.dumps({"step": s, "attempt": a, "ordinals": [s - 1]}) + "\n" for s, a in STEPS))
    run.metrics.write_text("".join(json.dumps({"step": s, "attempt": a, "lr": a}) + "\n" for s, a in STEPS))
    take_inputs(run, {"data.train.path": {"rows": "1"}, "rewards.0.name": {"reward.py": "2"}})
    for step in (2, 4):
        folder = run.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "weights.pt").write_bytes(b"w" * step)
        write_manifest(folder, Manifest(step, 1, 1, tuple(hash_files(folder, ["weights.pt"])), {"step": step}))
    return run


def fork(run: RunDir, *words: str) -> Result:
    return call("fork", str(run.path), *words)


def content(run: RunDir) -> dict[str, bytes]:
    return {str(file.relative_to(run.path)): file.read_bytes() for file in run.path.rglob("*") if file.is_file()}


def test_the_new_run_goes_on_from_the_step_and_the_other_stays_as_it_is(run: RunDir, tmp_path: Path) -> None:
    before = content(run)
    result = fork(run, "--step", "2", "train.lr=3e-4", "run.name=hotter")
    assert result.exit_code == 0, result.stderr
    new = RunDir(tmp_path / "hotter")
    assert f"hpc-grpo submit {new.path}" in result.output
    changed = differences(read_config(run), read_config(new))
    assert {key: now for key, (_, now) in changed.items()} == {"train.lr": 3e-4, "run.name": "hotter"}
    assert [found.step for found in valid_checkpoints(new)] == [2]
    assert check_ledger(new).steps == 2
    assert [line["step"] for line in read_jsonl(new.metrics)] == [1, 2]
    assert read_inputs(new).fingerprints == {"data.train.path": {"rows": "1"}}
    source = json.loads(new.source.read_text())
    assert (source["forked_from"], source["working_dir"]) == ({"run": str(run.path), "step": 2}, str(Path.cwd()))
    assert content(run) == before


def test_a_run_without_a_checkpoint_cannot_be_forked(run: RunDir) -> None:
    for step in (2, 4):
        (run.checkpoint(step) / "weights.pt").unlink()
    result = fork(run)
    assert (result.exit_code, "has no valid checkpoint" in result.stderr) == (EXIT_CONFIG, True)


def test_a_fork_of_a_cell_lies_beside_the_sweep(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / CELLS).mkdir()
    beside = tmp_path.parent / f"{tmp_path.name}-{run.path.name}-from-2"
    assert f"hpc-grpo submit {beside}" in fork(run, "--step", "2").output
    assert [found.step for found in valid_checkpoints(RunDir(beside))] == [2]


def test_without_a_step_the_newest_checkpoint_is_forked(run: RunDir, tmp_path: Path) -> None:
    assert f"Forked {run.path} at step 4: {tmp_path / 'debug-from-4'}" in fork(run, "train.lr=3e-4").output


def test_the_fork_keeps_its_checkpoint_when_the_run_removes_it(run: RunDir, tmp_path: Path) -> None:
    assert fork(run, "--step", "2").exit_code == 0
    new = RunDir(tmp_path / "debug-from-2")
    inode = (new.checkpoint(2) / "weights.pt").stat().st_ino
    assert inode == (run.checkpoint(2) / "weights.pt").stat().st_ino, "no second copy on the disk"
    assert prune_checkpoints(run, keep_last=1) == [2]
    assert [found.step for found in valid_checkpoints(new)] == [2]


def test_a_disk_without_hard_links_gets_a_copy(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(forking.os, "link", refuse)
    assert fork(run, "--step", "4").exit_code == 0
    new = RunDir(tmp_path / "debug-from-4")
    assert [found.step for found in valid_checkpoints(new)] == [4]
    lines = read_metrics(new.metrics)
    assert [line["lr"] for line in lines.values()] == [1, 1, 2, 2], "a step that was trained again counts once"


def test_the_model_and_the_training_data_stay_and_functions_may_change(run: RunDir, tmp_path: Path) -> None:
    assert fork(run, "--step", "2").exit_code == 0
    assert [*read_inputs(RunDir(tmp_path / "debug-from-2")).fingerprints] == ["data.train.path"]


def test_a_checkpoint_that_goes_while_it_is_copied_is_one_error(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that trains prunes its checkpoints."""

    def link_late(source: str, target: str) -> None:
        prune_checkpoints(run, keep_last=1)
        link(source, target)

    link = os.link
    monkeypatch.setattr(forking.os, "link", link_late)
    result = fork(run, "--step", "2")
    assert (result.exit_code, result.stderr.count("error: ")) == (EXIT_CONFIG, 1)
    assert "Steps with a checkpoint: 4." in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["debug"]


def test_a_disk_that_fails_leaves_nothing(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(forking.os, "link", fail)
    monkeypatch.setattr(forking.shutil, "copy2", fail)
    with pytest.raises(OSError, match="disk full"):
        fork(run, "--step", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["debug"]


def test_a_run_that_takes_the_name_meanwhile_is_not_replaced(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(new: RunDir, config: Config) -> None:
        write_config(new, config)
        (tmp_path / "debug-from-2").mkdir()
        (tmp_path / "debug-from-2" / "config.yaml").write_text("another run")

    monkeypatch.setattr(forking, "write_config", write_late)
    with pytest.raises(OSError, match="not empty"):
        fork(run, "--step", "2")
    assert (tmp_path / "debug-from-2" / "config.yaml").read_text() == "another run"


def test_a_fork_of_a_fork_goes_on(run: RunDir, tmp_path: Path) -> None:
    assert fork(run, "--step", "4", "train.lr=3e-4").exit_code == 0
    assert fork(RunDir(tmp_path / "debug-from-4"), "--step", "4", "train.lr=6e-4", "run.name=third").exit_code == 0
    third = RunDir(tmp_path / "third")
    assert check_ledger(third).is_sound
    assert json.loads(third.source.read_text())["forked_from"]["run"] == str(tmp_path / "debug-from-4")


def test_a_fork_is_compared_with_its_run_and_looks_like_a_run(run: RunDir, tmp_path: Path) -> None:
    assert fork(run, "--step", "2", "train.lr=3e-4").exit_code == 0
    new = str(tmp_path / "debug-from-2")
    compared = call("compare", str(run.path), new).output.splitlines()
    assert [line.split() for line in compared[:2]] == [
        ["CONFIG", "debug", "debug-from-2"],
        ["train.lr", "0.0001", "0.0003"],
    ]
    assert call("status", new).exit_code == call("config", new).exit_code == 0
    facts = run_data(RunDir(Path(new)), "x", MetricColumns(run.metrics), 0.0)["facts"]
    assert ["forked from", f"step 2 of {run.path}"] in facts


@pytest.mark.parametrize(
    ("length", "word", "is_refused"),
    [
        ("train.total_epochs=2", "rollout.prompts_per_step=3", True),
        ("train.total_epochs=2", "rollout.group_size=2", False),
        ("train.total_episodes=400", "rollout.group_size=2", True),
        ("train.total_steps=20", "rollout.prompts_per_step=3", False),
    ],
)
def test_a_step_of_another_size_needs_a_length_in_steps(
    run: RunDir, tmp_path: Path, length: str, word: str, is_refused: bool
) -> None:
    """Steps of the other size would be counted as if they had this one."""
    write_config(run, with_overrides(read_config(run), [length]))
    result = fork(run, "--step", "2", word)
    assert (result.exit_code == EXIT_CONFIG) is is_refused
    if is_refused:
        assert "now (it may change if you also give train.total_steps)" in result.stderr
        assert fork(run, "--step", "2", word, "train.total_steps=20").exit_code == 0
    changed = differences(read_config(run), read_config(RunDir(tmp_path / "debug-from-2")))
    assert word in [f"{key}={now}" for key, (_, now) in changed.items()]


@pytest.mark.parametrize("drops", [True, False])
def test_a_fork_keeps_the_limit_that_decides_which_demonstrations_are_dropped(run: RunDir, drops: bool) -> None:
    words = [f"run.root={run.path.parent}", f"run.name={run.path.name}", f"data.drop_long_prompts={drops}"]
    write_config(run, load_config("local/tiny_sft", words))
    result = fork(run, "--step", "2", "train.max_tokens_per_microbatch=64")
    assert ("there, 64 now (the checkpoint holds a position in the data)" in result.stderr) is drops
    assert (result.exit_code == EXIT_CONFIG) is drops


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "3"], "Steps with a checkpoint: 2, 4."),
        (["--step", "2", "model.path=org/other"], "model.path: 'org/m' there, 'org/other' now"),
        (["--step", "2", "train.zero_stage=1"], "train.zero_stage: 2 there, 1 now"),
        (["--step", "2", "train.adamw.weight_decay=0.1"], "train.adamw.weight_decay: 0.0 there, 0.1 now"),
        (["--step", "2", "train.num_minibatches=2"], "1 there, 2 now (the checkpoint counts optimizer steps)"),
        (["--step", "2", "lora={rank: 4}"], "lora.rank: None there, 4 now"),
        (["--step", "2", "data.train.path=org/others"], "data.train.path: 'org/rows' there"),
        (["--step", "2", "train.lrr=1"], "did you mean 'lr'?"),
        (["train.learning_rate=1"], "learning_rate is TRL's: here set train.lr"),
        (["--step", "2", "run.name=debug"], "a fork needs a new directory"),
    ],
)
def test_what_cannot_be_forked_is_one_error(run: RunDir, tmp_path: Path, words: list[str], message: str) -> None:
    result = fork(run, *words)
    assert (result.exit_code, result.stderr.count("error: ")) == (EXIT_CONFIG, 1)
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["debug"]
