"""Every file of a run directory, damaged in every way: a resume is right or refuses in words, and removes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config, load_config
from hpc_grpo.data.fingerprint import fingerprints
from hpc_grpo.driver.learners import Checkpoints, refuse_without_checkpoint
from hpc_grpo.driver.schedule import Durations, StepTimes, TrainLength
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch import freeze as freeze_module
from hpc_grpo.launch.freeze import freeze, working_dir
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.report.status import read_records
from hpc_grpo.run import source
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.checkpoint import Checkpoint, Manifest, hash_files, write_manifest
from hpc_grpo.run.files import write_record
from hpc_grpo.run.frozen_config import read_config, take_inputs
from hpc_grpo.run.ledger import Ledger, check_ledger
from hpc_grpo.run.lock import LockOwner, RunLock
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState, read_metrics, read_state, write_state

STEP = 4


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else content


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "emptied": lambda content: b"",
    "torn": lambda content: content[: len(content) // 2],
    "flipped": flipped,
    "removed": lambda content: None,
}


class FakeLearners:
    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.loaded = checkpoint.step


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the config of a run with a reward of the user's own; the package that it copies is a small one."""
    model, package = tmp_path / "model", tmp_path / "installed" / "hpc_grpo"
    for folder in (model, package):
        folder.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text('{"vocab": 7}')
    (package / "__init__.py").write_text('__version__ = "1"\n')
    monkeypatch.setattr(source, "PACKAGE", package)
    monkeypatch.setattr(freeze_module, "PACKAGE", package)
    (tmp_path / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "my_reward.py").write_text("import my_words\ndef reward(prompts, completions): return [0.0]\n")
    (tmp_path / "my_words.py").write_text("WORDS = []\n")
    words = [f"run.root={tmp_path / 'runs'}", f"model.path={model}", f"data.train.path={tmp_path / 'data.jsonl'}"]
    return load_config(
        "local/debug",
        [*words, f'rewards=[{{name: "{tmp_path}/my_reward.py:reward"}}]', "data.eval=null", "eval.every=null"],
    )


@pytest.fixture
def run(config: Config) -> RunDir:
    """Return a run as one leaves it that was killed after step 5, with checkpoints of steps 2 and 4."""
    run = freeze(config, ["hpc-grpo", "submit"], [])
    take_inputs(run, fingerprints(config, Path(), {}))
    write_chain(run, ChainRecord().with_link("17"))
    ledger, sink = Ledger(run, 1), JsonlSink(run.metrics)
    for step in range(1, 6):
        ledger.append(step, [step - 1])
        with run.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "attempt": 1, "time": 1.0, "reward/mean": 0.5}) + "\n")
    sink.close()
    for step in (2, STEP):
        folder = run.checkpoint(step)
        (folder / "deepspeed").mkdir(parents=True)
        (folder / "deepspeed" / "weights.pt").write_bytes(bytes(range(256)))
        (folder / "rng_rank_0.pt").write_bytes(b"numbers")
        files = tuple(hash_files(folder, ["deepspeed/weights.pt", "rng_rank_0.pt"]))
        write_manifest(folder, Manifest(step, 1, 1, files, {"step": step, "next_ordinal": step}))
    write_state(run, RunState(5, 9, 1, "training", step_p95_s=2.0, save_p95_s=1.0))
    write_record(run.holder, asdict(LockOwner("another-host", 7, 1, "17", 1, 0.0)))
    attempt = run.attempt(1, "17")
    attempt.mkdir(parents=True)
    AttemptRecord(1, "17", "slurm", ["n1"], 0.0, None, 7, first_step=0).save(attempt)
    others = [attempt / "driver.log", run.secret, run.rollouts(5), run.export(2) / "model.safetensors", run.wandb_id]
    for path in (*others, run.stop_marker, run.slurm_log("17")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left by the attempt before\n")
    return run


def resume(run: RunDir, config: Config) -> int:
    """Do what a resume does until it trains; returns the step it goes on from. Raises HpcGrpoError."""
    read_records(run)
    freeze(config, ["hpc-grpo", "submit"], [])
    working_dir(run)
    RunLock.take(run, "18", run.next_attempt_number(), sleep=lambda _: None).release()
    read_attempts(run), read_chain(run)
    refuse_without_checkpoint(run)
    take_inputs(run, fingerprints(read_config(run), Path(), {}))
    StepTimes.after(read_state(run))
    learners: Any = FakeLearners()
    state = Checkpoints(read_config(run), run, learners, Durations(), TrainLength(100, 4, 10)).resume()
    assert (learners.loaded, state.next_ordinal) == (state.step, state.step)
    Ledger(run, 2).append(state.step + 1, [state.step])
    JsonlSink(run.metrics).close()
    read_metrics(run.metrics), check_ledger(run)
    return state.step


def outcomes(run: RunDir, config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield file, damage and what came of it; the run is as before after each."""
    before = {path: path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}
    for path, content in before.items():
        for damage, damaged in DAMAGES.items():
            if (left := damaged(content)) is None:
                path.unlink()
            else:
                path.write_bytes(left)
            there = {p for p in run.path.rglob("*") if p.is_file()}
            try:
                outcome = f"from step {resume(run, config)}"
            except HpcGrpoError as error:
                assert error.exit_code == 78
                outcome = f"refused: {error}"
            aside = run.checkpoints / f"step_{STEP}.damaged"
            kept_aside = {run.checkpoint(STEP) / p.relative_to(aside) for p in aside.rglob("*")}
            assert {p for p in there if not p.exists()} - kept_aside <= {run.holder}
            yield str(path.relative_to(run.path)), damage, outcome
            shutil.rmtree(aside, ignore_errors=True)
            for left_over in [p for p in run.path.rglob("*") if p.is_file() and p not in before]:
                left_over.unlink()
            for kept, text in before.items():
                kept.parent.mkdir(parents=True, exist_ok=True)
                if not kept.is_file() or kept.read_bytes() != text:
                    kept.write_bytes(text)


def expected(name: str, damage: str) -> str:
    if name.startswith("source/") and name != "source/git.diff":
        return "refused: The run's own copy of hpc-grpo in "
    if name == "config.yaml" and damage == "flipped":
        return ""
    if name.startswith("checkpoints/step_4/") and "manifest" not in name:
        return "from step 2"
    return "from step 4"


def test_a_resume_after_any_damage_is_right_or_refused(
    run: RunDir, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    table = list(outcomes(run, config))
    print("\n".join(f"{name:45} {damage:8} {outcome.splitlines()[0][:150]}" for name, damage, outcome in table))
    wrong = [
        (name, damage, outcome) for name, damage, outcome in table if not outcome.startswith(expected(name, damage))
    ]
    assert wrong == []
    assert len(table) > 100
    assert resume(run, config) == STEP
