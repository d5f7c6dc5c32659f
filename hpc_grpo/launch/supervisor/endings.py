"""Tell how a driver ended, and how its attempt ends with it: from exit codes and facts to words for the user."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_grpo.errors import (
    EXIT_COMPLETE,
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_RESUMABLE,
    EXIT_UNAVAILABLE,
    ConfigError,
    EndAskedError,
    HpcGrpoError,
)
from hpc_grpo.launch.supervisor import events
from hpc_grpo.launch.supervisor.events import End
from hpc_grpo.run.attempt import ExitKind
from hpc_grpo.system.signals import signal_name


def end_of_driver(ended: events.DriverEnded, signalled: str, lost: Mapping[str, str], told: str = "") -> End:
    """Return how a driver ended, and how its attempt ends unless it is started again.

    `signalled` names the signal that the supervisor was sent, "" if none; `lost` maps nodes to why they are gone;
    `told` says why the nodes were told to end, "" if they were not.
    """
    returncode = ended.returncode
    if ended.facts.is_complete:  # whatever became of its driver after that
        return End("complete", EXIT_COMPLETE, "The run is complete.")
    if returncode == EXIT_RESUMABLE:
        why = f"{told} Checkpointed in time: the next job carries on." if told else ""
        return End("resumable", EXIT_RESUMABLE, why or "Checkpointed with more to do; start it again to carry on.")
    if lost:
        named = "; ".join(f"{node}: {why}" for node, why in lost.items())
        return End("node_lost", EXIT_CRASH, f"Lost {len(lost)} node(s) while training. {named}")
    if returncode == EXIT_UNAVAILABLE:
        return End("node_lost", EXIT_CRASH, "A node of the attempt is gone from Ray; see driver.log.")
    said = f": {ended.last_error}; see driver.log." if ended.last_error else "; see driver.log."
    if returncode == EXIT_CONFIG:
        return End("config", EXIT_CONFIG, f"Something must be changed first{said}")
    if told:
        return End("crash", EXIT_CRASH, f"{told} The driver wrote no checkpoint in that time; see driver.log.")
    if signalled:
        return End("cancelled", EXIT_CRASH, f"Ended by {signalled}, sent to the supervisor.")
    if returncode == EXIT_COMPLETE:
        return End("crash", EXIT_CRASH, "The driver exited with 0 but wrote no COMPLETE: it ended without finishing.")
    if returncode < 0:
        name = signal_name(-returncode)
        if name == "SIGKILL":  # which no process lives to say
            said = " (often the kernel, out of memory); see driver.log."
        return End("crash", 128 - returncode, f"The driver was killed by {name}{said}")
    return End("crash", returncode, f"The driver crashed with exit code {returncode}{said}")


def end_by_error(error: BaseException, signalled: str) -> End:
    if not isinstance(error, HpcGrpoError):
        return End("crash", EXIT_CRASH, f"The supervisor failed: {error!r}")
    if isinstance(error, EndAskedError):
        kind: ExitKind = "resumable" if error.exit_code == EXIT_RESUMABLE else "cancelled"
        return End(kind, error.exit_code, str(error))
    if signalled:
        return End("cancelled", error.exit_code, str(error))
    return End("config" if isinstance(error, ConfigError) else "bringup_failed", error.exit_code, str(error))
