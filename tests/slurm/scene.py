"""A run in a chain of jobs to which something happens, for the chaos table: what is done to it, what became of it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from tests.integration.training_runs import LETTERS, tiny_config, write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.support.outcomes import Outcome

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

STAND_IN_CONFIG = ("local/debug", "data.train.path=org/rows", "eval.every=null")
"""For a driver that reads no data: names no file, which `submit` would look for."""

DEADLINE_S = 900.0
NUM_STEPS = 24
STRUCK_AT_STEP = 5
HEAD, WORKER = "nid001", "nid002"
URGENT = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--time=1", "--wrap=sleep 3"]
"""Submits a job that preempts those of partitions `cancelled` and `requeued`."""
SUPERVISOR = r"\S*python\S* (-E )?-u \S+/source attempt"


@contextmanager
def full(folder: Path, seconds: float) -> Iterator[None]:
    """Fill the disk of a folder for the block, and for `seconds` at least."""
    filler, begun = folder / "filler", time.monotonic()
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    yield
    time.sleep(max(0.0, seconds - (time.monotonic() - begun)))
    filler.unlink()


def chain_is_over(cluster: SlurmCluster, run: RunDir) -> bool:
    """Whether no further link is to come, and none of its jobs is left."""
    record = read_chain(run)
    jobs = ",".join(link.job_id for link in record.links)
    return record.ended != "" and not cluster.run(["squeue", "-h", "-j", jobs]).stdout.strip()


class Scene:
    """A run that was handed in with `hpc-grpo submit`; nothing is done for it afterwards."""

    def __init__(self, cluster: SlurmCluster, run: RunDir) -> None:
        self.cluster, self.run = cluster, run
        self._struck_at = 0.0
        self._struck_after = 0
        self._lost_s: float | None = None

    @classmethod
    def submit_run(
        cls, cluster: SlurmCluster, folder: Path, *, num_nodes: int, driver: str = DEFAULT_DRIVER, **sections: Any
    ) -> Scene:
        """A chain of ten-minute jobs; a checkpoint every two steps, each of which takes a second or more."""
        workspace = write_workspace(folder)
        slurm = {"gpus_per_node": 2, "cpus_per_node": 4, "time_min": 10}
        slurm |= sections.pop("slurm", {})
        settings: dict[str, Any] = {
            "train": {"total_steps": NUM_STEPS, "lr": 1e-3},
            "rewards": [{"name": LETTERS, "args": {"delay_s": 0.2}}],
            "checkpoint": {"every": 2},
            **sections,
        }
        launch = {"num_nodes": num_nodes, "slurm": slurm, "max_stalled_attempts": 2, **settings.pop("launch", {})}
        config = tiny_config(workspace, "chaos", **settings, launch=launch)
        scene = cls(cluster, RunDir(Path(settings.get("run", {}).get("root", workspace / "runs")) / "chaos"))
        scene.command("submit", str(config), "--driver", driver, cwd=workspace)
        return scene

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """`hpc-grpo` on the login node."""
        done = self.cluster.run(
            [sys.executable, "-m", "hpc_grpo.cli", *words],
            environment=ENVIRONMENT,
            cwd=cwd or self.run.path.parent,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            state = read_state(self.run)
            return state is not None and state.phase == "training" and state.step >= step

        self.cluster.wait_until(is_there, DEADLINE_S, f"step {step} is done")

    @property
    def step(self) -> int:
        return max((line["step"] for line in read_jsonl(self.run.ledger)), default=0)

    @property
    def jobs(self) -> list[str]:
        return [link.job_id for link in read_chain(self.run).links]

    def running_job(self) -> str:
        """Wait for a link of the chain to run; return its id."""
        seen: list[str] = []

        def is_running() -> bool:
            listed = ["squeue", "-h", "-t", "R", "-o", "%i", "-j", ",".join(self.jobs)]
            seen[:] = self.cluster.run(listed).stdout.split()
            return seen != []

        self.cluster.wait_until(is_running, DEADLINE_S, "a link of the chain runs")
        return seen[0]

    def kill(self, node: str, pattern: str) -> None:
        """SIGKILL one process on the node whose command line `pattern` matches."""
        self.cluster.output(["kill", "-9", self.pids(node, pattern)[0]], on=node)

    def pids(self, node: str, pattern: str) -> list[str]:
        matching = self.find(node, pattern)
        assert matching, f"no process {pattern} on {node}"
        return matching

    def find(self, node: str, pattern: str) -> list[str]:
        """The processes on the node whose command lines `pattern` matches."""
        lines = "for p in /proc/[0-9]*; do echo ${p#/proc/} $(tr '\\0' ' ' < $p/cmdline); done 2>/dev/null; true"
        listed = self.cluster.output(["bash", "-c", lines], on=node).splitlines()
        found = [line.split(" ", 1) for line in listed if " " in line]
        return [pid for pid, command in found if re.match(pattern, command)]

    def strike(self, blow: Callable[[], object]) -> None:
        """Once the run is well under way."""
        self.wait_for_step(STRUCK_AT_STEP)
        self._struck_at = time.monotonic()
        blow()
        self._struck_after = self.step

    def see_it_through(self) -> Outcome:
        """Wait until the chain is over and none of its jobs is left."""
        self.cluster.wait_until(self._is_over, DEADLINE_S, "the chain is over")
        ledger = check_ledger(self.run)
        assert ledger.is_sound, ledger
        assert read_chain(self.run).successor == ""
        attempts = read_attempts(self.run)
        (status,) = json.loads(self.command("status", "--json", str(self.run.path)))
        return Outcome(
            state=status["state"],
            num_attempts=len(attempts),
            num_restarts=sum(len(attempt.restarts) for attempt in attempts),
            lost_s=self._lost_s,
            lost_steps=ledger.undone,
            told="\n".join([f"status: {status['state']}; {status['problem']}", *self._explained()]),
        )

    def _is_over(self) -> bool:
        if self._lost_s is None and self._struck_at and self.step > self._struck_after:
            self._lost_s = time.monotonic() - self._struck_at
        return chain_is_over(self.cluster, self.run)

    def _explained(self) -> list[str]:
        wanted = ("Attempt", "  ended", "  why", "  lost node", "  restarted", "  said", "  cause", "  what to do")
        lines = self.command("status", "--why", str(self.run.path)).splitlines()
        return [line for line in lines if line.startswith((*wanted, "   "))]
