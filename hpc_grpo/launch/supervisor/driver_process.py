"""The driver's process, managed by the supervisor: its output, its log, its signals and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_grpo.launch.agent.folders import OwnedDir
from hpc_grpo.launch.agent.program import Inside, Program
from hpc_grpo.launch.agent.watch import WAKING_S, Watch, Watched
from hpc_grpo.run.contract import PULSE_VARIABLE
from hpc_grpo.run.files import when_there_is_space
from hpc_grpo.run.pulse import read_pulse
from hpc_grpo.run.stacks import STACKS_SIGNAL
from hpc_grpo.system.processes import catches, hold_on, start_time
from hpc_grpo.system.say import ForeignOutput, undrawn

_KEPT_BYTES = 1 << 16


class Driver:
    """A running driver. Its output goes to this process's stdout and to driver.log, as plain text."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path, inside: Inside | None = None
    ) -> None:
        """Start the driver in `cwd`. In a container, it shares a folder with this process, not descriptors."""
        self._log = when_there_is_space(lambda: log_path.open("ab", buffering=0), log_path.name)
        self._printed = b""
        self._output = ForeignOutput()
        self._reader, writer = os.pipe()
        self._folder = OwnedDir(inside.pid_file.parent) if inside else None
        if self._folder:
            pulse = str(self._folder.path / "pulse")
            self._pulse = os.open(pulse, os.O_RDWR | os.O_CREAT, 0o600)
        else:
            self._pulse = os.memfd_create("pulse")
            pulse = f"/proc/self/fd/{self._pulse}"
        self._watch = Watch()
        self.work = ""
        told, passed = {**env, PULSE_VARIABLE: pulse}, [] if inside else [self._pulse]
        self.program = Program(command, told, inside, stdout=writer, stderr=writer, pass_fds=passed, cwd=cwd)
        os.close(writer)
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    @property
    def printed(self) -> str:
        """The end of this driver's output. The log also holds the output of earlier drivers."""
        return self._printed.decode(errors="replace")

    def pump(self) -> bool:
        """Forward the output. Return False once no more can come."""
        while True:
            try:
                data = os.read(self._reader, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._pass_on(self._output.take(data))

    def _pass_on(self, text: str) -> None:
        plain = undrawn(text).encode()
        # On a full disk or a closed terminal, lose output instead of ending the run.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stdout.buffer.write(plain)
            sys.stdout.buffer.flush()
        self._printed = (self._printed + plain)[-_KEPT_BYTES:]
        with contextlib.suppress(OSError):
            self._log.write(plain)

    def forward(self, sig: int) -> None:
        """Forward a signal. SIGUSR1 and STACKS_SIGNAL go only to a driver with a handler: they would kill it otherwise.

        A driver that has no handlers yet gets SIGTERM for SIGINT: Python would answer SIGINT with a traceback.
        """
        if sig == signal.SIGINT and not catches(self.program.pid, signal.SIGTERM):
            sig = signal.SIGTERM
        is_request = sig in (signal.SIGUSR1, STACKS_SIGNAL)
        if not is_request or catches(self.program.pid, sig):
            if sig == signal.SIGKILL and hold_on(self.program.pid) == "stopped":
                self.program.send(signal.SIGCONT)  # A stopped driver writes its stacks only now.
                time.sleep(WAKING_S)
            self.program.send(sig)

    def why_late(self) -> str:
        """Return why the driver is late, in a sentence; "" if it is not late. Call it about every second.

        Also updates `work` from the driver's pulse.
        """
        pid, pulse = self.program.pid, read_pulse(self._pulse)
        self.work = pulse.work
        process = Watched("driver", pid, start_time(pid), pulse)
        return next((late.why for late in self._watch.late([process])), "")

    def close(self, grace_s: float) -> None:
        """End the driver, if it still runs, and all processes left in its session."""
        self.program.end(grace_s)
        self.pump()
        self._pass_on(self._output.take(b"", final=True))
        os.close(self._reader)
        os.close(self._pulse)
        if self._folder:
            self._folder.remove()
        with contextlib.suppress(OSError):
            self._log.close()
