"""A real run that was damaged, moved and edited between two attempts: it goes on from its own copy, or says why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.files import read_record, write_record
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import SUMS, sums_digest, sums_of
from tests.integration.training_runs import RUN_DEADLINE_S, tiny_config, write_workspace

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHECKOUT = Path(__file__).resolve().parents[2]
MARKED = (
    "launch/supervisor/supervisor.py",
    "launch/agent/agent.py",
    "launch/agent/ray_program.py",
    "driver/main.py",
    "learner/actor.py",
    "engine/actor.py",
    "grading/grader.py",
    "grading/worker.py",
)
"""A module of every process of a run."""


def train(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `hpc-grpo train` in the checkout, whose package is on the path of whatever Python starts there."""
    return subprocess.run(
        [sys.executable, "-m", "hpc_grpo.cli", "train", str(config), *words],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S * 2,
        check=False,
    )


def mark(run: RunDir, marks: Path) -> None:
    """Have modules of the run's copy leave a file when they are imported; its sums are those of the marked ones."""
    marks.mkdir()
    for name in MARKED:
        module = run.source_dir / "hpc_grpo" / name
        text = module.read_text()
        line = f"open({str(marks / name.replace('/', '.'))!r}, 'w').close()\n"
        future = "from __future__ import annotations\n"
        module.write_text(text.replace(future, future + line, 1))
    sums = sums_of(run.source_dir)
    (run.source_dir / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    source = read_record(run.source, dict)
    assert source is not None
    write_record(run.source, {**source, "copy": sums_digest(run)}, keep_copy=True)


def test_a_run_moved_edited_and_damaged_goes_on_from_its_own_copy(tmp_path: Path) -> None:
    config = tiny_config(write_workspace(tmp_path), "demo", train={"total_steps": 2}, checkpoint={"every": 1})
    begun = train(config)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    (tmp_path / "elsewhere").mkdir()
    run = RunDir((tmp_path / "runs" / "demo").rename(tmp_path / "elsewhere" / "demo"))
    assert [found.step for found in valid_checkpoints(run)] == [2, 1]
    mark(run, tmp_path / "marks")
    moved = [f"run.root={tmp_path / 'elsewhere'}"]

    # Every process of the resumed run is of its own copy.
    resumed = train(config, *moved, "train.total_steps=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "Resuming after step 2 of 3." in resumed.stdout
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == sorted(n.replace("/", ".") for n in MARKED)

    # Small files are gone or torn, and the newest checkpoint has a flipped bit.
    run.config.write_text("")
    run.source.unlink()
    run.state.write_bytes(run.state.read_bytes()[:40])
    for attempt in run.attempts.glob("*/attempt.json"):
        attempt.write_text("{")
    weights = max((run.checkpoint(3) / "deepspeed").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    repaired = train(config, *moved, "train.total_steps=4")
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert re.search(r"Damaged, and kept as step_3.damaged: checkpoint step_3: \S+ is corrupt", repaired.stdout)
    assert "Resuming after step 2 of 4." in repaired.stdout
    assert check_ledger(run).is_sound

    # Other data, and then no whole checkpoint: refused in words, and nothing is removed.
    data = tmp_path / "train.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join([lines[1], lines[0], *lines[2:]]))
    refused = train(config, *moved, "train.total_steps=5")
    assert refused.returncode == 78
    assert "data.train.path, train.jsonl: " in refused.stdout + refused.stderr
    accepted = train(config, *moved, "train.total_steps=5", "--accept-changes")
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    inputs = json.loads(run.inputs.read_text())
    assert list(inputs["accepted"][0]["changed"]) == ["data.train.path, train.jsonl"]
    for folder in run.checkpoints.glob("step_*"):
        for name in ("manifest.json", ".manifest.json.copy"):
            (folder / name).unlink()
    before = sorted(run.checkpoints.rglob("*"))
    lost = train(config, *moved, "train.total_steps=6")
    assert lost.returncode == 78
    assert "No checkpoint in" in lost.stderr
    assert "step_5: manifest.json is missing" in lost.stderr
    assert "Traceback" not in lost.stdout + lost.stderr
    assert sorted(run.checkpoints.rglob("*")) == before
