"""Compare the bytes that a run writes below run.root with the space that is left there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.config.resources import trained_parameters, weight_bytes
from hpc_grpo.plan.budgets import policy_parameters, replayed_bytes
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.memory import Part, nonzero
from hpc_grpo.plan.step import num_steps
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.retention import taken_on_disk
from hpc_grpo.system.disk import Room, room_in
from hpc_grpo.types import DTYPE_BYTES

OPTIMIZER_BYTES = 12
"""Bytes per parameter in a checkpoint: float32 weights and AdamW's two moments, in shards, also with offload."""
BYTES_PER_TOKEN = 4
"""Bytes of a logged completion for each token, assumed: four letters."""
RECORD_BYTES = 400
"""Assumed bytes of a logged rollout besides its text: rewards, advantage and their names."""
BATCH_BYTES_PER_TOKEN = 17
"""Bytes of a kept batch for each token: its id, advantage, logprob and version with four bytes each, and its mask."""
FILES_OF_RUN, FILES_PER_SHARD, FILES_PER_EXPORT = 1000, 4, 20
"""Assumed numbers of files: of a run besides its steps (the copy of hpc-grpo, logs), of each learner's part of a
checkpoint, and of an export. Each step has one file of rollouts.
"""
STEP_BYTES = 4096
"""Bytes of a step's lines in metrics.jsonl and ledger.jsonl, assumed."""


@dataclass(frozen=True)
class DiskBudget:
    """The bytes that a run writes below its folder, or that all runs of a sweep write below the sweep's folder.

    `sure` follows from the model's size; `estimated` is an upper limit. `room` is the space there, including what the
    run has already written.
    """

    folder: Path
    sure: tuple[Part, ...]
    estimated: tuple[Part, ...]
    num_files: int
    room: Room

    @property
    def sure_bytes(self) -> int:
        return sum(part.num_bytes for part in self.sure)

    @property
    def num_bytes(self) -> int:
        return self.sure_bytes + sum(part.num_bytes for part in self.estimated)

    @property
    def is_too_large(self) -> bool:
        """Return whether the checkpoints and exports alone exceed the room: the run would wait for space forever."""
        return self.sure_bytes > self.room.num_bytes

    @property
    def fits(self) -> bool:
        return self.num_bytes <= self.room.num_bytes


def read_disk(plans: Sequence[Plan]) -> DiskBudget:
    """Return the disk budget of all plans' run directories, with the room that this machine sees."""
    room = room_for([RunDir(plan.config.run_path) for plan in plans])
    return added([disk_budget(plan, room) for plan in plans])


def room_for(runs: Sequence[RunDir]) -> Room:
    """Return the room for runs in one folder. Their existing files count as room, because they are replaced."""
    room, taken = room_in(runs[0].path), [taken_on_disk(run.path) for run in runs]
    files = None if room.num_files is None else room.num_files + sum(own.num_files for own in taken)
    return replace(room, num_bytes=room.num_bytes + sum(own.num_bytes for own in taken), num_files=files)


def added(budgets: Sequence[DiskBudget]) -> DiskBudget:
    """Return the budget of all runs of a sweep together, which share their room."""
    first, number = budgets[0], len(budgets)
    if number == 1:
        return first

    def sums(parts: Iterable[Part]) -> tuple[Part, ...]:
        by_name: dict[str, list[Part]] = {}
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
        return tuple(
            Part(name, sum(part.num_bytes for part in own), f"{number} runs, the first: {own[0].formula}")
            for name, own in by_name.items()
        )

    return DiskBudget(
        folder=first.folder.parent,
        sure=sums(part for budget in budgets for part in budget.sure),
        estimated=sums(part for budget in budgets for part in budget.estimated),
        num_files=sum(budget.num_files for budget in budgets),
        room=first.room,
    )


def disk_budget(plan: Plan, room: Room) -> DiskBudget:
    config, steps = plan.config, num_steps(plan)
    p, letter = policy_parameters(plan.model, config)
    frozen = plan.model.num_parameters - p
    trained = trained_parameters(config, plan.model.num_parameters) - frozen
    checkpoints, exports = num_checkpoints(config, steps), num_exports(config, steps)
    each = checkpoint_bytes(config, plan.model.num_parameters, frozen)
    saved = f"{checkpoints} x {each // max(p, 1)} {letter}: keep_last, and the one being written"
    exported, every = f"{exports} x {'2 ' * (trained > p)}b {letter}", config.checkpoint.export_every
    if every is not None and every.known_steps is None and config.checkpoint.keep_exports is None:
        exported += ", at least: more come by epochs or seconds, and checkpoint.keep_exports = null keeps all"
    sure = nonzero(
        Part("checkpoints", checkpoints * each, saved),
        Part("exports", exports * weight_bytes(config, trained), exported),
    )
    shards = plan.num_learners * FILES_PER_SHARD
    files = FILES_OF_RUN + checkpoints * shards + exports * FILES_PER_EXPORT
    files += (steps or 0) * config.needs.rollouts + config.checkpoint.keep_batches * plan.num_learners
    return DiskBudget(
        config.run_path, sure, _text_parts(config, steps, replayed_bytes(plan.model, config)), files, room
    )


def checkpoint_bytes(config: Config, num_parameters: int, num_frozen: int = 0) -> int:
    """Return the size of a checkpoint: 12 P under ZeRO-3, whose shards are all float32; stages 1 and 2 add b P.

    Frozen parameters are not saved. A reference that follows the policy adds b P, or 4 P for an average. The sizes are
    those of files that DeepSpeed 0.19.8 writes; a test compares them.
    """
    whole = 0 if config.train.zero_stage == 3 else DTYPE_BYTES[config.model.dtype]
    reference = 0
    if config.loss.kl.refresh_steps is not None:
        reference = 4 if config.loss.kl.averages else DTYPE_BYTES[config.model.dtype]
    trained = trained_parameters(config, num_parameters) - num_frozen
    return (OPTIMIZER_BYTES + whole) * trained + reference * num_parameters


def num_checkpoints(config: Config, num_steps: int | None) -> int:
    """Count the checkpoints on disk at the same time: the kept ones, and a new one before the oldest is removed."""
    every, at_once = config.checkpoint.every, config.checkpoint.keep_last + 1
    if every is None:
        return min(at_once, 2)
    if num_steps is None or every.known_steps is None:
        return at_once
    return min(at_once, num_steps // every.known_steps + 2)


def num_exports(config: Config, num_steps: int | None) -> int:
    """Count the exports on disk at the same time: the kept ones and the one being written; at least one.

    If epochs or seconds make exports due, counts the limit of kept exports; without a limit, only exports due by steps.
    """
    every, keep = config.checkpoint.export_every, config.checkpoint.keep_exports
    if every is None:
        return 1
    by_steps = ceil(num_steps / every.steps) if num_steps is not None and every.steps is not None else None
    if keep is None:
        return by_steps or 1
    return keep + 1 if by_steps is None or every.known_steps is None else min(by_steps, keep + 1)


def _text_parts(config: Config, steps: int | None, routed_bytes: int) -> tuple[Part, ...]:
    rollout, kept, kept_bytes = config.rollout, config.checkpoint.keep_batches, BATCH_BYTES_PER_TOKEN + routed_bytes
    sequences, longest = config.task_args.batch_size, config.train.max_tokens_per_microbatch  # as they are packed
    if config.needs.rollouts:  # groups that dynamic sampling drops are not kept
        sequences, longest = rollout.prompts_per_step * rollout.group_size, config.max_model_len
    kept = min(kept, steps or kept)
    formula = f"{kept} steps x {sequences:,} x {longest:,} tokens x {kept_bytes}, at most"
    batches = nonzero(Part("batches", kept * sequences * longest * kept_bytes, formula))
    if steps is None:
        return batches
    lines = Part("metrics, ledger", steps * STEP_BYTES, f"{steps:,} steps x {STEP_BYTES:,}, assumed")
    if not config.needs.rollouts:
        return (*batches, lines)
    each = longest * BYTES_PER_TOKEN + RECORD_BYTES
    logged = rollout.logged_fraction * sequences * (rollout.dynamic_sampling or 1)
    formula = f"{logged:g} a step x {each:,}, at most; {BYTES_PER_TOKEN} bytes a token assumed"
    return Part("rollouts", int(steps * logged * each), formula), *batches, lines
