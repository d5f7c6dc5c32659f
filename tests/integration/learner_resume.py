"""Checkpoints of learners for the tests beside this file: staged, written while steps go on, and taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.paths import RunDir
from tests.integration.learner_processes import make_step, save_together, weights_of

STAGES = (1, 2, 3)


def resume(learner: Any, config: Any, rank: int, world_size: int, root: Path) -> Any:
    """Stage a checkpoint, take two more steps, write it, and take them again from it with a fresh learner.

    A fork takes the first of them at twice the learning rate, with another clipping.
    """
    from hpc_grpo.learner.checkpoint import export_model, load_checkpoint
    from hpc_grpo.learner.learner import Learner

    folder = root / f"{world_size}_ranks" / f"stage_{config.train.zero_stage}"
    run_dir = RunDir(folder)
    write = save_together(learner, run_dir.checkpoint(5), {"step": 5, "next_ordinal": 20}, behind=True)
    export_model(learner, run_dir.export(5))
    straight = [learner.train_step(make_step(seed, rank, world_size)) for seed in (7, 8)]
    expected = weights_of(learner)
    write()

    fresh = Learner(config, rank, world_size)
    driver_state = load_checkpoint(fresh, run_dir.checkpoint(5))
    version = fresh.policy_version
    again = [fresh.train_step(make_step(seed, rank, world_size)) for seed in (7, 8)]
    faster = config.train.model_copy(update={"lr": 2 * config.train.lr, "max_grad_norm": 0.125})
    fork = Learner(config.model_copy(update={"train": faster}), rank, world_size)
    load_checkpoint(fork, run_dir.checkpoint(5))
    other = RunDir(root / f"{3 - world_size}_ranks" / f"stage_{config.train.zero_stage}")
    resharded = resume_from(other, config, rank, world_size) if other.checkpoint(5).exists() else None
    return {
        "straight": (straight, expected),
        "again": (again, weights_of(fresh)),
        "forked": fork.train_step(make_step(7, rank, world_size)),
        "clip": fork.ds_engine.optimizer.clip_grad,
        "driver_state": driver_state,
        "version": version,
        "resharded": resharded,
    }


def resume_from(run_dir: RunDir, config: Any, rank: int, world_size: int) -> Any:
    """The same two steps from a checkpoint that another number of ranks wrote. One alone loads as a replay does."""
    from hpc_grpo.cli.replay import load_here
    from hpc_grpo.learner.checkpoint import load_checkpoint, write_universal
    from hpc_grpo.learner.learner import Learner
    from hpc_grpo.run.files import recover_dirs

    fresh = Learner(config, rank, world_size)
    (checkpoint,) = valid_checkpoints(run_dir)
    driver_state = checkpoint.manifest.driver_state
    if world_size == 1:
        load_here(fresh, checkpoint)
    else:
        if rank == 0:
            write_universal(checkpoint.path)
        torch.distributed.barrier()
        driver_state = load_checkpoint(fresh, checkpoint.path)
        torch.distributed.barrier()
        if rank == 0:
            recover_dirs(run_dir.checkpoints)
    lrs = [learner.train_step(make_step(seed, rank, world_size))["lr"] for learner, seed in ((fresh, 7), (fresh, 8))]
    return {"driver_state": driver_state, "version": fresh.policy_version, "lr": lrs, "weights": weights_of(fresh)}
