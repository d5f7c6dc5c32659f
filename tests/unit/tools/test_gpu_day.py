"""What the script for a day on GPUs makes of parts that fail, that are done, and that a node is too small for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_grpo.config import load_config

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_day.sh"
PYTHON = 'case $1 in *weight_publish.py) echo "no room"; exit 3 ;; *gpu_learner.py) exit 124 ;; esac'


@pytest.mark.parametrize(("num_gpus", "left_out", "num_runs"), [(0, 8, 0), (2, 3, 4), (4, 0, 7)])
def test_a_part_that_fails_is_named_and_tried_again_and_one_that_needs_more_gpus_is_left_out(
    tmp_path: Path, num_gpus: int, left_out: int, num_runs: int
) -> None:
    runs = tmp_path / "runs"

    def day(python: str) -> tuple[int, list[str], str]:
        train = f'[ $1 != train ] || printf "%s\\n" "$@" "" >> {runs}'
        limit = f'echo "$1 $2" >> {tmp_path}/limits; exec /usr/bin/timeout "$@"'
        programs = {"python": python, "hpc-grpo": train, "nvidia-smi": f"seq {num_gpus}", "timeout": limit}
        for name, body in programs.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / name).chmod(0o755)
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run([SCRIPT, tmp_path / "out"], env=environ, capture_output=True, text=True, check=False)
        return done.returncode, (tmp_path / "out/summary.txt").read_text().splitlines(), done.stdout

    code, lines, _ = day(PYTHON)
    assert code == 1
    assert "publish: failed with 3: no room" in lines
    assert (f"learner: stopped after 480 s, see {tmp_path}/out/learner.log" in lines) == (num_gpus > 0)
    assert set((tmp_path / "limits").read_text().splitlines()) == {"--kill-after=20 480"}
    assert sum("left out: it needs" in line for line in lines) == left_out
    code, lines, said = day("")
    assert code == 0, said
    assert any(re.fullmatch(r"publish: \d+ s", line) for line in lines)
    assert "install: done before" in said
    trained = runs.read_text().strip().split("\n\n") if num_runs else []
    assert len(trained) == num_runs
    for words in trained:
        command, name, *overrides = words.splitlines()
        assert (command, load_config(name, overrides).model.device) == ("train", "cuda")
