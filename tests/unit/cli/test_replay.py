"""`hpc-grpo model replay`: which keys may change in it, and what it shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.cli.replay import Replay, export_checkpoint, shown
from hpc_grpo.config import Config, load_config
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.checkpoint import Manifest, hash_files, write_manifest
from hpc_grpo.run.paths import RunDir
from tests.support.command import call
from tests.support.configs import minimal_config

SAME = Replay({"loss/policy": 0.1, "lr": 1e-6}, {"loss/policy": 0.1, "lr": 1e-6, "loss/kl": 2.0}, 1, 4)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    words = [f"run.root={tmp_path}", "loss.clip_high=0.3"]
    words += ["data.train.path=d", "data.eval=null", "eval.every=null"]
    return freeze(load_config("local/debug", words), [], [])


@pytest.fixture
def trained_by(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    asked: list[Config] = []

    def replay(run: RunDir, step: int, config: Config, changed: Config) -> Replay:
        asked.append(changed)
        return SAME

    monkeypatch.setattr("hpc_grpo.cli.replay.train_again", replay)
    monkeypatch.setattr("hpc_grpo.cli.replay.learner_environment", lambda *_, **__: {})
    monkeypatch.chdir(Path.cwd())
    return asked


def replay(run: RunDir, *words: str) -> Any:
    return call("model", "replay", str(run.path), "--step", "5", *words)


def test_another_loss_brings_the_settings_of_its_paper_but_for_those_that_are_given(
    run: RunDir, trained_by: list[Config]
) -> None:
    assert replay(run, "loss.name=dapo", "loss.clip_low=0.1").exit_code == 0
    loss = trained_by[0].loss
    assert (loss.name, loss.clip_low, loss.clip_high) == ("dapo", 0.1, 0.28)
    assert replay(run, "loss.kl.coef=0.1").exit_code == 0
    assert (trained_by[1].loss.clip_high, trained_by[1].loss.kl.coef) == (0.3, 0.1)
    assert replay(run, "loss.name=cispo", "loss.correction.name=icepop").exit_code == 0
    loss = trained_by[2].loss
    assert (loss.name, loss.clip_high, loss.correction.args.low, loss.correction.args.cap) == ("cispo", 4.0, 0.5, 5.0)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "loss.advantage=rloo",
            "loss.advantage cannot change in a replay: the advantages",
        ),
        ("train.lr=1e-3", "train.lr cannot change in a replay: it has no effect"),
        ("rollout.group_size=2", "rollout.group_size cannot change in a replay"),
    ],
)
def test_keys_that_a_replay_would_not_show_are_refused(
    run: RunDir, trained_by: list[Config], override: str, said: str
) -> None:
    done = replay(run, override)
    assert (done.exit_code, said in done.stderr) == (EXIT_CONFIG, True)
    assert trained_by == []


def test_relative_paths_of_the_config_are_those_of_the_folder_that_the_run_was_started_in(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_in, asked = Path.cwd(), []

    def export_checkpoint(run: RunDir, step: int | None, config: Config, *, merged: bool) -> Path:
        asked.append(Path.cwd())
        print("a library reports")
        return run.export(3)

    monkeypatch.setattr("hpc_grpo.cli.replay.export_checkpoint", export_checkpoint)
    monkeypatch.setattr("hpc_grpo.cli.replay.learner_environment", lambda *_, **__: {})
    monkeypatch.chdir(tmp_path)
    done = call("model", "export", str(run.path))
    assert (asked, done.stdout) == ([started_in], f"{run.export(3)}\n")


@pytest.mark.parametrize(("num_learners", "loaded"), [(1, ["critic", "adapter"]), (2, ["adapter"])])
def test_an_export_leaves_out_the_critic_that_one_learner_cannot_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_learners: int, loaded: list[str]
) -> None:
    ppo = minimal_config(task="ppo", run={"name": "r", "root": str(tmp_path)})
    run = RunDir(ppo.run_path)
    run.checkpoint(4).mkdir(parents=True)
    (run.checkpoint(4) / "weights.pt").touch()
    files = tuple(hash_files(run.checkpoint(4), ["weights.pt"]))
    write_manifest(run.checkpoint(4), Manifest(4, num_learners, 2, files, {"step": 4}))
    parts = [SimpleNamespace(name="critic", ds_engines=[1]), SimpleNamespace(name="adapter", ds_engines=[])]
    exported: list[Path] = []
    for name, stand_in in {
        "learner.Learner": lambda *_, **__: SimpleNamespace(parts=parts),
        "checkpoint.write_universal": lambda *_: None,
        "checkpoint.load_checkpoint": lambda learner, *_: names.extend(part.name for part in learner.parts),
        "checkpoint.export_model": lambda _learner, folder, merged: exported.append(folder),
    }.items():
        monkeypatch.setattr(f"hpc_grpo.learner.{name}", stand_in)
    names: list[str] = []
    assert [export_checkpoint(run, None, ppo)] == exported == [run.export(4)]
    assert names == loaded


@pytest.mark.parametrize("out", [(), ("--out", "given")])
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.lr=1e-3", "train.lr cannot change in an export: it has no effect there. Choose loss.*, "),
        ("model.dtype=half", "model.dtype = 'half'"),
        ("--merged", "--merged merges the adapter of a run with lora. Run debug has none: leave it out."),
    ],
)
def test_an_export_reads_its_words_also_where_it_copies_an_existing_one(
    run: RunDir, out: tuple[str, ...], word: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hpc_grpo.cli.replay.learner_environment", lambda *_, **__: {})
    monkeypatch.chdir(tmp_path)
    run.export(3).mkdir(parents=True)
    done = call("model", "export", str(run.path), word, *out)
    assert (done.exit_code, said in done.stderr) == (EXIT_CONFIG, True), done.output


def test_a_step_whose_batch_was_not_kept_is_an_error_that_names_the_key(run: RunDir) -> None:
    done = replay(run)
    assert done.exit_code == EXIT_CONFIG
    assert "The batch of step 1 of run" in done.stderr
    assert "set checkpoint.keep_batches" in done.stderr


def test_equal_metrics_are_said_to_be_equal_and_others_by_how_much_they_are_not() -> None:
    lines = shown(SAME, 5).splitlines()
    assert lines[1].split() == ["loss/policy", "0.1", "0.1", "0"]
    assert lines[3].split() == ["loss/kl", "-", "2", "-"]
    assert lines[-1] == "Step 5: all 2 metrics equal those of the run, to the last bit."
    apart = Replay({"loss/policy": 0.25}, {"loss/policy": 0.25 + 2**-30}, 2, 4)
    assert shown(apart, 5).splitlines()[1:] == [
        "loss/policy  0.25      0.250000001  9.31e-10",
        "The run shared the step among 2 learners, which sum in another order.",
    ]


def test_an_export_of_a_run_without_a_checkpoint_says_when_there_is_one(run: RunDir) -> None:
    done = call("model", "export", str(run.path), "--step", "7")
    assert done.exit_code == EXIT_CONFIG
    assert "Run debug has no valid checkpoint. A run writes its first one after its first step." in done.stderr
