"""A run on a bed of machines, started as its user starts it, to which something happens; what became of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from tests.integration.training_runs import tiny_config, write_workspace
from tests.places.conftest import wait_until
from tests.support.outcomes import Outcome
from tools.virtual_machines.beds import Bed

DEADLINE_S = 240.0
STRUCK_AT_STEP = 5
NUM_STEPS = 24
STEPPING = str(Path(__file__).resolve().parents[1] / "stand_ins" / "stepping.py")
PROGRAMS = Path(sys.executable).parent


class Command:
    """A command at a terminal of a machine."""

    def __init__(self, bed: Bed, machine: str, argv: list[str], folder: Path, environment: dict[str, str]):
        self.bed, self.machine = bed, machine
        self._log = folder / f"{machine}.{time.time_ns()}.log"
        self._word = " ".join(argv)
        path = f"{PROGRAMS}:{bed.environment(machine)['PATH']}"
        with self._log.open("wb") as log:
            self.process = bed.popen(
                machine,
                argv,
                environment={"PATH": path, **environment},
                cwd=bed.layout.storage,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def expect(self, pattern: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until it has printed `pattern`."""

        def is_there() -> bool:
            printed = re.search(pattern, self.text) is not None
            assert printed or self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            return printed

        wait_until(is_there, deadline_s, f"{pattern!r} of {self._word} on {self.machine}:\n{self.text}")

    def ctrl_c(self) -> None:
        """To the whole foreground, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self._word} runs on {self.machine} after {deadline_s:.0f} s:\n{self.text}"
            ) from None

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Scene:
    """A run in the bed's storage. Use as a context, which ends its commands."""

    def __init__(self, bed: Bed, name: str, **sections: Any) -> None:
        self.bed = bed
        self.commands: list[Command] = []
        self.workspace = bed.storage(bed.names[0]) / name
        self.workspace.mkdir()
        write_workspace(self.workspace)
        launch = {"num_nodes": len(bed.shape.node_names), "object_store_gib": 0.1, **sections.pop("launch", {})}
        train = {"total_steps": NUM_STEPS, **sections.pop("train", {})}
        self.config = tiny_config(self.workspace, name, launch=launch, train=train, **sections)
        self.run = RunDir(self.workspace / "runs" / name)
        self._struck_at: float | None = None
        self._struck_after = 0
        self._lost_s: float | None = None

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self.commands:
            command.end()

    def start(self, machine: str, *words: str, **environment: str) -> Command:
        """Type `hpc-grpo WORDS` on a machine."""
        return self.type(machine, sys.executable, "-m", "hpc_grpo.cli", *words, **environment)

    def type(self, machine: str, *argv: str, **environment: str) -> Command:
        command = Command(self.bed, machine, list(argv), self.workspace, environment)
        self.commands.append(command)
        return command

    def start_stepping(self, machine: str, *words: str, **environment: str) -> Command:
        """As `start`, with the stand-in for the driver."""
        return self.start(machine, *words, "--driver", STEPPING, **environment)

    @property
    def step(self) -> int:
        return max((line["step"] for line in read_jsonl(self.run.ledger)), default=0)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step >= step, DEADLINE_S, f"step {step} is done:\n{self._said()}")

    def strike(self, blow: Callable[[], object]) -> None:
        """Once the run is well under way."""
        self.wait_for_step(STRUCK_AT_STEP)
        self._struck_at = time.monotonic()
        blow()
        self._struck_after = self.step

    def await_recovery(self) -> None:
        """Wait for a step that had not been done at the blow."""
        assert self._struck_at is not None
        wait_until(lambda: self.step > self._struck_after, DEADLINE_S, f"a further step:\n{self._said()}")
        self._lost_s = time.monotonic() - self._struck_at

    @property
    def attempts(self) -> list[AttemptRecord]:
        return read_attempts(self.run)

    def outcome(self) -> Outcome:
        """What became of the run, once its commands are over. Its ledger must be sound."""
        ledger = check_ledger(self.run)
        assert ledger.is_sound, ledger
        (status,) = json.loads(self._told_by("status", "--json", str(self.run.path)))
        explained = [line for line in self._told_by("status", "--why", str(self.run.path)).splitlines() if line.strip()]
        return Outcome(
            state=status["state"],
            num_attempts=len(self.attempts),
            num_restarts=sum(len(attempt.restarts) for attempt in self.attempts),
            lost_s=self._lost_s,
            lost_steps=ledger.undone,
            told="\n".join([f"status: {status['state']}; {status['problem']}", *explained]),
        )

    def is_complete_to_the_end(self) -> bool:
        state = read_state(self.run)
        return self.run.is_complete() and state is not None and state.step == state.total_steps

    def _told_by(self, *words: str) -> str:
        command = [sys.executable, "-m", "hpc_grpo.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    def _said(self) -> str:
        return "\n".join(f"--- {command.machine}\n{command.text[-3000:]}" for command in self.commands)
