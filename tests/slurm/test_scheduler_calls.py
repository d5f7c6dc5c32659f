"""What a chained run asks of the scheduler: sites forbid polling it."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.paths import RunDir
from tests.slurm.scene import STAND_IN_CONFIG

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_chain_outlives_its_test")]

STAND_IN = str(Path(__file__).resolve().parents[1] / "stand_ins" / "driver.py")
ASKING = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo", "sacctmgr", "sstat", "sprio")
MAX_CALLS_PER_LINK = 6
DEADLINE_S = 300.0


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A file in which every call of one of Slurm's commands leaves a line, in jobs too; beside it a `bin` for PATH."""
    log, folder = tmp_path / "calls", tmp_path / "bin"
    log.touch()
    folder.mkdir()
    for name in ASKING:
        wrapper = folder / name
        wrapper.write_text(f'#!/bin/sh\necho "$(hostname) {name} $*" >> {log}\nexec {shutil.which(name)} "$@"\n')
        wrapper.chmod(0o755)
    return log


def test_a_link_asks_little_and_looking_on_asks_nothing(
    slurm_cluster: SlurmCluster, tmp_path: Path, calls: Path
) -> None:
    path = f"{calls.parent / 'bin'}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": path, "HPC_GRPO_STAND_IN_EXIT": "75"}
    command = [sys.executable, "-m", "hpc_grpo.cli"]
    config = [*STAND_IN_CONFIG, f"run.root={tmp_path}", "launch.slurm.cpus_per_node=2", "--driver", STAND_IN]
    config.append("launch.slurm.extra.gres=gpu:2")  # of the config, and no more of them from link to link
    options = {"environment": environment, "cwd": tmp_path}
    slurm_cluster.output([*command, "submit", *config, "--time", "5", "--chain", "2"], **options)  # type: ignore[arg-type]
    run = RunDir(tmp_path / "debug")
    slurm_cluster.wait_until(lambda: bool(read_attempts(run)), DEADLINE_S, "the first job trains")
    for words in (["status"], ["status", "--json"], ["logs"], ["status", "--why"]):
        slurm_cluster.output([*command, *words, str(run.path)], **options)  # type: ignore[arg-type]

    def is_over() -> bool:
        jobs = [link.job_id for link in read_chain(run).links]
        return len(jobs) == 3 and not slurm_cluster.run(["squeue", "-h", "-j", ",".join(jobs)]).stdout.strip()

    slurm_cluster.wait_until(is_over, DEADLINE_S, "three jobs have run")
    assert [attempt.num_gpus for attempt in read_attempts(run)] == [2, 2, 2]
    lines = calls.read_text().splitlines()
    by_host = Counter(line.split()[0] for line in lines)
    print(*lines, sep="\n")
    assert by_host["login01"] == 5, (
        "submit asks for the partitions, calls sbatch three times and scontrol, and nothing else asks"
    )
    in_jobs = len(lines) - by_host["login01"]
    assert 0 < in_jobs <= 3 * MAX_CALLS_PER_LINK
