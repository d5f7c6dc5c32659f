"""Saving and restoring everything a learner's next step depends on.

Consumes  the engine's state on every rank: weights, optimizer, schedule, random number generators.
Produces  one folder that a manifest proves whole; resuming from it with as many ranks is bit-identical.
Waits for all ranks: both functions are collectives.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.reshard import universal_folder, universal_loading
from hpc_grpo.run.checkpoint import FileEntry, Manifest, hash_files, problems, read_manifest, write_manifest
from hpc_grpo.run.files import publish_dir, staging_path, start_staging

if TYPE_CHECKING:
    from hpc_grpo.learner.learner import Learner

T = TypeVar("T")

TAG = "deepspeed"
"""DeepSpeed's folder in a checkpoint."""


def save_checkpoint(learner: Learner, directory: Path, driver_state: dict[str, Any]) -> None:
    """Write `directory` atomically; a checkpoint already there is replaced only once the new one is whole.

    Raises OSError or RuntimeError when a file cannot be written (a full disk); older checkpoints are untouched.
    """
    rank, world_size, ds_engine = learner.rank, learner.world_size, learner.ds_engine
    if rank == 0:
        start_staging(directory)
    dist.barrier()
    staging = staging_path(directory)
    ds_engine.save_checkpoint(str(staging), tag=TAG, save_latest=False)
    torch.save(_rng_state(), staging / f"rng_rank_{rank}.pt")
    dist.barrier()
    files = _hash_together(staging, rank, world_size)
    if rank == 0:
        stage = learner.config.train.zero_stage
        write_manifest(staging, Manifest(learner.policy_version, world_size, stage, files, driver_state))
        publish_dir(directory)
    dist.barrier()


def load_checkpoint(learner: Learner, directory: Path) -> dict[str, Any]:
    """Restore `directory`; gives the driver state stored with it.

    Of one that another number of learners wrote, `write_universal` must have been called. Raises ConfigError if it is
    no whole checkpoint, or was written under another ZeRO stage.
    """
    rank, world_size, ds_engine = learner.rank, learner.world_size, learner.ds_engine
    manifest = read_manifest(directory)
    if manifest is None:
        raise ConfigError(f"{directory} is no checkpoint: its manifest.json is missing or unreadable.")
    if wrong := problems(directory, manifest, check_hashes=False):
        raise ConfigError(f"Checkpoint {directory} is damaged: {'; '.join(wrong)}. Remove it to use an older one.")
    if manifest.zero_stage != learner.config.train.zero_stage:
        raise ConfigError(
            f"Checkpoint {directory} was written with train.zero_stage = {manifest.zero_stage}; set it so again."
        )
    is_resharded = manifest.world_size != world_size
    with universal_loading(ds_engine) if is_resharded else nullcontext():
        folder = universal_folder(directory) if is_resharded else directory
        loaded, _ = ds_engine.load_checkpoint(str(folder), tag=TAG)
    if loaded is None:
        raise ConfigError(f"DeepSpeed found no state in {directory}.")
    # Written by this project and verified above; weights_only still refuses anything but tensors and numbers.
    _restore_rng(torch.load(directory / f"rng_rank_{rank % manifest.world_size}.pt", weights_only=True))
    return manifest.driver_state


def _hash_together(staging: Path, rank: int, world_size: int) -> tuple[FileEntry, ...]:
    """Every rank hashes its share of the files; all of them are known on every rank afterwards."""
    # One list for all: a network file system may show a rank the folder without what others have just written there.
    own_names = [str(file.relative_to(staging)) for file in staging.rglob("*") if file.is_file()]
    names = sorted({name for seen in _gather(own_names, world_size) for name in seen})
    shares = _gather(hash_files(staging, names[rank::world_size]), world_size)
    return tuple(sorted((entry for share in shares for entry in share), key=lambda entry: entry.name))


def _gather(own: list[T], world_size: int) -> list[list[T]]:
    """Every rank's list, by rank."""
    lists: list[list[T]] = [[] for _ in range(world_size)]
    dist.all_gather_object(lists, own)
    return lists


def _rng_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "python": random.getstate(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
