"""sbatch/launch_grpo_2nodes_ray.sh: which command its words and CONFIG become."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAME = "launch_grpo_2nodes_ray.sh"
SCRIPT = Path(__file__).resolve().parents[5] / "sbatch" / NAME


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy beside no .venv, with an `hpc-grpo` on PATH that prints its words."""
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "hpc-grpo"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    return Path(shutil.copy(SCRIPT, tmp_path / "sbatch" / NAME))


def typed(script: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{script.parents[1] / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(["bash", str(script), *words], env={"PATH": path, **environ}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ((), "place host head my.yaml"),
        (("head",), "place host head my.yaml"),
        (("worker",), "place host worker my.yaml"),
        (("stop",), "place host stop my.yaml"),
        (("worker", "train.lr=1e-6"), "place host worker my.yaml train.lr=1e-6"),
        (("worker", "other.yaml"), "place host worker other.yaml"),
        (("other.yaml", "train.lr=1e-6"), "place host head other.yaml train.lr=1e-6"),
    ],
)
def test_a_role_and_a_config_become_the_command_host(script: Path, words: tuple[str, ...], becomes: str) -> None:
    assert typed(script, *words, CONFIG="my.yaml").stdout == becomes + "\n"


def test_without_a_config_the_usage_is_shown(script: Path) -> None:
    done = typed(script, "worker")
    assert (done.returncode, done.stdout) == (78, "")
    assert "export CONFIG" in done.stderr
