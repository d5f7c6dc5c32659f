"""`attempt.json`: what an attempt was and how it ended, in words a user can act on."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from hpc_grpo.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_CRASH, EXIT_RESUMABLE
from hpc_grpo.run_dir import write_json_atomic

ExitKind = Literal["running", "complete", "resumable", "config", "crash", "cancelled", "bringup_failed", "node_lost"]


@dataclass
class AttemptRecord:
    """The content of attempt.json. Times are unix seconds; `phases_s` are durations by phase name."""

    attempt: int
    job_id: str
    source: str
    nodes: list[str]
    started_at: float
    ends_at: float | None
    supervisor_pid: int
    ray_address: str = ""
    num_gpus: int = 0
    ended_at: float | None = None
    exit_kind: ExitKind = "running"
    exit_code: int | None = None
    why: str = ""
    lost_nodes: dict[str, str] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)

    def save(self, attempt_dir: Path) -> None:
        write_json_atomic(attempt_dir / "attempt.json", asdict(self))

    def end(self, kind: ExitKind, exit_code: int, why: str) -> None:
        self.exit_kind, self.exit_code, self.why = kind, exit_code, why
        self.ended_at = time.time()


def classify(
    returncode: int, is_complete: bool, signalled: str, lost_nodes: dict[str, str]
) -> tuple[ExitKind, int, str]:
    """(kind, the supervisor's exit code, why) for a driver that ended with `returncode`.

    `signalled` names the signal that the supervisor was sent, if any.
    """
    if returncode == EXIT_COMPLETE and is_complete:
        return "complete", EXIT_COMPLETE, "The run is complete."
    if returncode == EXIT_RESUMABLE:
        return "resumable", EXIT_RESUMABLE, "Checkpointed with more to do; start it again to carry on."
    if returncode == EXIT_CONFIG:
        return "config", EXIT_CONFIG, "The driver rejected the configuration; its message is in driver.log."
    if signalled:
        return "cancelled", EXIT_CRASH, f"Ended by {signalled}, sent to the supervisor."
    if lost_nodes:
        named = "; ".join(f"{node}: {why}" for node, why in lost_nodes.items())
        return "node_lost", EXIT_CRASH, f"Lost {len(lost_nodes)} node(s) while training. {named}"
    if returncode == EXIT_COMPLETE:
        return "crash", EXIT_CRASH, "The driver exited with 0 but wrote no COMPLETE: it ended without finishing."
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (often the kernel, out of memory)" if name == "SIGKILL" else ""
        return "crash", 128 - returncode, f"The driver was killed by {name}{hint}; see driver.log."
    return "crash", returncode, f"The driver crashed with exit code {returncode}; see driver.log."
