"""Whether a starting link of a chain goes on. Pure: what it must know is in `Facts`, gathered by chain.py.

Slurm starts a successor whatever became of the job before it, which is the point: walltime, out-of-memory kills
and lost nodes are all covered. What no dependency can tell apart is told here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_grpo.launch.place.slurm.jobs import is_users_cancel
from hpc_grpo.run.attempt import NEAR_THE_LIMIT_S, ExitKind


@dataclass(frozen=True)
class PreviousLink:
    """`slurm_state` as sacct has it, "" if unknown. `left_s`: walltime that was left when it ended, if known.

    `was_killed`: before it had given the run up, whatever its record says.
    """

    job_id: str
    exit_kind: ExitKind
    why: str
    slurm_state: str = ""
    left_s: float | None = None
    was_killed: bool = False

    @property
    def could_not_tell(self) -> bool:
        """Whether it came to grief without a chance to say so. The time limit is no grief."""
        if self.exit_kind == "resumable" or self.slurm_state.startswith("TIMEOUT"):
            return False
        return self.was_killed or self.exit_kind in ("running", "cancelled")


@dataclass(frozen=True)
class Facts:
    """What a link finds when it starts. `attempts` and `stalled` count since the user last handed the run in;
    `stalled` are the latest attempts in a row without a new checkpoint. `node_hours` are all of the run's so far.
    `previous`: None in the user's own link.
    """

    is_complete: bool
    stop_asked: bool
    previous: PreviousLink | None
    attempts: int
    max_attempts: int | None
    stalled: int
    max_stalled: int
    node_hours: float = 0.0
    max_node_hours: float | None = None


@dataclass(frozen=True)
class Decision:
    goes_on: bool
    why: str
    gave_up: bool = False


def decide(facts: Facts) -> Decision:
    """Whether to train, and why not in words a user can act on."""
    if facts.is_complete:
        return Decision(False, "The run is complete.")
    if facts.stop_asked:
        return Decision(False, "The STOP file asks the run to end; hpc-grpo resume takes it up again.")
    if facts.max_node_hours is not None and facts.node_hours >= facts.max_node_hours:
        why = (
            f"{facts.node_hours:.1f} node-hours have been used; launch.slurm.max_node_hours = {facts.max_node_hours:g}."
        )
        return Decision(False, why, gave_up=True)
    if facts.previous is None:
        return Decision(True, "Handed in by the user.")
    previous = facts.previous
    if _was_cancelled(previous):
        return Decision(False, f"Job {previous.job_id} was cancelled by the user; hpc-grpo resume takes it up again.")
    if previous.exit_kind == "config":
        return Decision(False, f"The configuration must be changed first: {previous.why}", gave_up=True)
    if facts.stalled >= facts.max_stalled:
        why = f"No new checkpoint in {facts.stalled} attempts (launch.max_stalled_attempts). The last: {previous.why}"
        return Decision(False, why, gave_up=True)
    if facts.max_attempts is not None and facts.attempts >= facts.max_attempts:
        why = f"{facts.attempts} jobs have been used, as many as launch.slurm.max_job_chains allows."
        return Decision(False, why, gave_up=True)
    how = f"ended as {previous.exit_kind}"
    if previous.exit_kind == "running":
        how = f"ended without a word ({previous.slurm_state or 'and Slurm does not know how'})"
    return Decision(True, f"Job {previous.job_id} {how}; carrying on.")


def _was_cancelled(previous: PreviousLink) -> bool:
    if previous.slurm_state:
        return is_users_cancel(previous.slurm_state)
    # Slurm no longer knows: a job that was told to end long before its limit was cancelled by somebody.
    return previous.exit_kind == "cancelled" and previous.left_s is not None and previous.left_s > NEAR_THE_LIMIT_S
