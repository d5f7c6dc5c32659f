"""The virtual Slurm cluster, up for the session of tests that need it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.paths import RunDir
from tests.support.outcomes import Outcome, print_table
from tools.virtual_slurm.layout import Layout

REPOSITORY = Path(__file__).resolve().parents[2]
NODES = 2
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
"""Of a user whose shell has the project's environment active."""

EX_UNAVAILABLE = 69
CLUSTER_UP_DEADLINE_S = 300.0
_COMMAND_DEADLINE_S = 120.0
# Slurm's states that no job leaves again, except by requeue. Seen from sacct.
_FINAL_STATES = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
_FINAL_STATES |= {"PREEMPTED", "TIMEOUT"}


def virtual_slurm(
    arguments: Sequence[str],
    deadline_s: float,
    environment: dict[str, str] | None = None,
    cwd: Path = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **(environment or {})}
    # Found from any folder without PYTHONPATH, which every job would inherit.
    start = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from tools.virtual_slurm.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=variables, cwd=cwd)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: Slurm's state and "exit code:signal" as sacct writes them."""

    state: str
    exit_code: str


class SlurmCluster:
    """The cluster as a user on its login node sees it."""

    node_names = tuple(f"nid{i:03d}" for i in range(1, NODES + 1))

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float = _COMMAND_DEADLINE_S,
        environment: dict[str, str] | None = None,
        cwd: Path = REPOSITORY,
        on: str = "login01",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, or past Slurm on another machine. Does not raise on failure."""
        return virtual_slurm(["exec", "--on", on, "--", *argv], deadline_s, environment, cwd)

    def output(self, argv: Sequence[str], **options: float | Path | str) -> str:
        """What a command that must succeed prints."""
        done = self.run(argv, **options)  # type: ignore[arg-type]
        assert done.returncode == 0, f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, folder: Path, *options: str) -> int:
        """Submit a batch script; its output goes to FOLDER/ID.out."""
        path = folder / "job.sh"
        path.write_text(script)
        argv = ["sbatch", "--parsable", f"--output={folder}/%j.out", *options, str(path)]
        return int(self.output(argv, cwd=folder).partition(";")[0])

    def wait_for_job(self, job_id: int, deadline_s: float) -> JobEnd:
        """Wait until accounting has the job in a final state. On the deadline, cancel it and fail."""
        end = time.monotonic() + deadline_s
        seen = "nothing in sacct yet"
        while time.monotonic() < end:
            rows = self.output(["sacct", "-X", "-n", "-P", "-j", str(job_id), "-o", "State,ExitCode"]).splitlines()
            if rows:
                seen, _, exit_code = rows[-1].partition("|")
                state = seen.split()[0]  # "CANCELLED by 0"
                if state in _FINAL_STATES:
                    return JobEnd(state, exit_code)
            time.sleep(0.3)
        described = self.run(["scontrol", "show", "job", str(job_id)]).stdout
        self.run(["scancel", str(job_id)])
        pytest.fail(f"job {job_id} not over after {deadline_s:.0f} s: {seen}\n{described}")

    def run_job(self, script: str, folder: Path, *options: str, deadline_s: float = 60.0) -> str:
        """Submit a script, see it COMPLETED, return its output."""
        job_id = self.submit(script, folder, *options)
        end = self.wait_for_job(job_id, deadline_s)
        printed = (folder / f"{job_id}.out").read_text()
        assert end == JobEnd("COMPLETED", "0:0"), f"{end}\n{printed}"
        return printed

    def kill_node(self, name: str, *, cut_network: bool = False) -> None:
        self._change(["kill-node", name, *(["--cut-network"] if cut_network else [])])

    def start_node(self, name: str) -> None:
        self._change(["start-node", name])

    def unplug(self, name: str) -> None:
        self._change(["unplug", name])

    def plug(self, name: str) -> None:
        self._change(["plug", name])

    def wait_until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"after {deadline_s:.0f} s still not true: {what}")
            time.sleep(0.3)

    def _change(self, arguments: Sequence[str]) -> None:
        done = virtual_slurm(arguments, CLUSTER_UP_DEADLINE_S)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster. Brought up where it is not, and then taken down at the end; one that was up stays."""
    was_up = virtual_slurm(["status"], _COMMAND_DEADLINE_S).returncode == 0
    if not was_up:
        done = virtual_slurm(["up", "--nodes", str(NODES)], CLUSTER_UP_DEADLINE_S)
        if done.returncode == EX_UNAVAILABLE:
            pytest.skip(done.stderr.strip())
        if done.returncode != 0:
            pytest.fail(done.stderr.strip())
    try:
        yield SlurmCluster()
    finally:
        if not was_up:
            down = virtual_slurm(["down"], CLUSTER_UP_DEADLINE_S)
            assert down.returncode == 0, down.stderr


@pytest.fixture
def signals_reach_tasks_alone(slurm_cluster: SlurmCluster) -> None:
    """As on sites with proctrack/cgroup; another way to track processes has Slurm signal Ray's own as well."""
    if "proctrack/cgroup" not in slurm_cluster.output(["scontrol", "show", "config"]):
        pytest.skip("this machine has no freezer cgroup, by which Slurm signals a step's tasks alone")


@pytest.fixture
def small_disk(slurm_cluster: SlurmCluster) -> Iterator[Path]:
    """A folder on a file system of a few MiB that all nodes share, empty."""
    folder = Layout.from_environment().small_disk / "test"
    folder.mkdir(mode=0o777)
    yield folder
    shutil.rmtree(folder)


_outcomes: list[tuple[str, Outcome]] = []


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Outcome], None]:
    """Keep what became of a run for the table that is printed at the end."""
    return lambda outcome: _outcomes.append((request.node.name.removeprefix("test_"), outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_table(terminalreporter, _outcomes)


@pytest.fixture
def no_chain_outlives_its_test(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    yield
    for path in tmp_path.glob("**/chain.json"):
        run = RunDir(path.parent)
        run.stop_marker.touch()
        slurm_cluster.run(["scancel", "--quiet", *(link.job_id for link in read_chain(run).links)])
