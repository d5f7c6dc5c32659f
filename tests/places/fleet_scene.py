"""A fleet on a bed of VMs, as its user on the controller has it in hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.places.conftest import wait_until
from tools.virtual_machines import controller
from tools.virtual_machines.bed_layout import CONTROLLER
from tools.virtual_machines.beds import Bed

STAND_IN = Path(__file__).with_name("fleet_job.py")
FAST = {"poll_s": 1.0, "sweep_s": 0.5, "visit_s": 60.0, "stale_s": 6.0, "retry_s": 0.5}
_TABLES = """
import json, sys
import sqlalchemy as sa
from hpc_grpo.fleet.db import Database
from hpc_grpo.fleet.db import metadata
from hpc_grpo.fleet.settings import open_fleet
with Database(open_fleet(None).database_url).read() as connection:
    rows = {t.name: [dict(r) for r in connection.execute(sa.select(t)).mappings()] for t in metadata.sorted_tables}
print(json.dumps(rows))
"""
_SQL = """
import sys
import sqlalchemy as sa
from hpc_grpo.fleet.db import Database
from hpc_grpo.fleet.settings import open_fleet
with Database(open_fleet(None).database_url).write() as connection:
    connection.execute(sa.text(sys.argv[1]))
"""

Rows = dict[str, list[dict[str, Any]]]


class FleetScene:
    """Runs the fleet's commands on the controller; jobs are stand-ins unless `program` says otherwise."""

    def __init__(self, bed: Bed, name: str, *, postgres: bool = False, nats: bool = False, **settings: Any) -> None:
        self.bed = bed
        self.folder = bed.layout.storage / name
        self.ran = self.folder / "ran"
        self.ran.mkdir(parents=True)
        self.environment = {"HPC_GRPO_FLEET": str(self.folder)}
        if postgres:
            self.environment["HPC_GRPO_FLEET_DATABASE"] = controller.database_url(bed.layout)
        program = {"program": [sys.executable, str(STAND_IN), str(self.ran)]}
        nats_url = {"nats": controller.NATS_URL} if nats else {}
        self._up: list[subprocess.Popen[str]] = []
        (self.folder / "fleet.yaml").write_text(json.dumps({**FAST, **program, **nats_url, **settings}))
        self.fleet("init")

    def fleet(self, *words: str, deadline_s: float = 60.0) -> str:
        """Run a command of the fleet's on the controller; it must succeed."""
        done = self.bed.run(CONTROLLER, self._argv(*words), environment=self.environment, deadline_s=deadline_s)
        assert done.returncode == 0, (words, done)
        return done.stdout

    def up(self, *words: str) -> subprocess.Popen[str]:
        """Start a controller: all loops, or the one that `words` name."""
        log = (self.folder / f"up-{len(self._up)}.log").open("w")
        argv = self._argv(*(words or ("up",)))
        process = self.bed.popen(CONTROLLER, argv, environment=self.environment, stdout=log, stderr=log)
        log.close()
        self._up.append(process)
        return process

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("up-*.log")))

    def add_vms(self, *names: str) -> None:
        """Add VMs with the host keys that the bed made."""
        keys = {line.split()[0].split(",")[0]: line.split(None, 1)[1] for line in self._known_hosts()}
        for name in names:
            words = ["--key", str(self.bed.layout.ssh_key), "--user", "root", "--python", sys.executable]
            where = ["--work-dir", str(self.folder / "on" / name), "--name", name]
            self.fleet("vm", "add", self.bed.address(name), "--host-key", keys[name].strip(), *words, *where)

    def submit(self, count: int, model: str, *, first: int = 1, **values: Any) -> list[str]:
        """Add rows of jobs in one transaction, as anybody's INSERT would; job-1 is the oldest."""
        ids = [f"job-{number}" for number in range(first, first + count)]
        common = {"model": model, "dataset": "d", "reward_function": "r", **values}
        rows = [{"job_id": job_id, "submitted_at": number, **common} for number, job_id in enumerate(ids)]
        texts = (", ".join(repr(value) for value in row.values()) for row in rows)
        self.sql(f"INSERT INTO jobs ({', '.join(rows[0])}) VALUES {', '.join(f'({text})' for text in texts)}")
        return ids

    def sql(self, statement: str) -> None:
        self._python(_SQL, statement)

    def rows(self) -> Rows:
        """All tables; {} while the database is away."""
        done = self.bed.run(CONTROLLER, [sys.executable, "-c", _TABLES], environment=self.environment)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def states(self) -> list[str]:
        return sorted(job["status"] for job in self.rows().get("jobs", []))

    def job(self, job_id: str) -> dict[str, Any]:
        return next(job for job in self.rows()["jobs"] if job["job_id"] == job_id)

    def vm_state(self, name: str) -> str:
        return next(str(vm["state"]) for vm in self.rows()["vms"] if vm["name"] == name)

    def wait_for_all(self, state: str, count: int, deadline_s: float) -> None:
        wait_until(lambda: self.states() == [state] * count, deadline_s, f"{count} jobs are {state}")

    def runs(self) -> list[dict[str, Any]]:
        """What the stand-ins noted, by when they began."""
        notes = [json.loads(path.read_text() or "{}") for path in self.ran.glob("ran-*.json")]
        return sorted((note for note in notes if note), key=lambda note: note["began"])

    def assert_sound(self) -> None:
        """No two stand-ins held one GPU, or were of one job, at a time: by their locks, and by what they noted."""
        violations = self.ran / "violations"
        assert not violations.exists(), violations.read_text()
        for key in ("gpus", "job"):
            by_holder: dict[str, list[tuple[float, float]]] = {}
            for note in self.runs():
                for holder in note[key] if key == "gpus" else [note[key]]:
                    by_holder.setdefault(holder, []).append((note["began"], note["ended"]))
            for holder, spans in by_holder.items():
                for (_, ended), (began, _) in pairwise(spans):
                    assert ended <= began, (holder, spans)

    def close(self) -> None:
        """End controllers, and what runs on the VMs."""
        for process in self._up:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        for name in self.bed.names:
            for pid, words in self.bed.processes(name).items():
                if str(self.folder) in words:
                    kill(pid)
        wait_until(lambda: not any(self.bed.residue(name) for name in self.bed.names), 30, "the VMs are idle")
        shutil.rmtree(self.folder)
        if "HPC_GRPO_FLEET_DATABASE" in self.environment:
            controller.stop(self.bed.layout, "postgres")
            controller.wipe(self.bed.layout, "postgres")
            controller.start(self.bed.layout, "postgres")

    def _python(self, program: str, *words: str) -> None:
        done = self.bed.run(CONTROLLER, [sys.executable, "-c", program, *words], environment=self.environment)
        assert done.returncode == 0, done

    def _argv(self, *words: str) -> Sequence[str]:
        return [sys.executable, "-m", "hpc_grpo.cli", "place", "fleet", *words]

    def _known_hosts(self) -> list[str]:
        return self.bed.layout.known_hosts.read_text().splitlines()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def fleet_on(bed: Bed, vms: Sequence[str], **options: Any) -> Iterator[FleetScene]:
    """A fleet of these VMs for the block; what was said by its controllers is shown where the block fails."""
    scene = FleetScene(bed, f"fleet-{time.monotonic_ns()}", **options)
    try:
        scene.add_vms(*vms)
        yield scene
        scene.assert_sound()
    except BaseException:
        print(scene.said(), json.dumps(scene.rows(), indent=1)[-6000:])
        raise
    finally:
        scene.close()
