"""The learner actor, one per rank: the driver's calls to a Learner and to its node's weight publisher.

Most calls are collectives: the driver makes them on all learners at once. Calls of the groups WRITING and WATCHING run
beside training. The actor fetches samples by their references: token arrays never pass through the driver.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.metrics.profiling import StackProfile, TorchTrace
from hpc_grpo.run.checkpoint import FileEntry
from hpc_grpo.run.contract import SHM_DIR_VARIABLE
from hpc_grpo.run.pulse import PULSE, patience_of_actor
from hpc_grpo.run.stacks import dump_stacks_on_signal
from hpc_grpo.system.gpus import keep_near_gpus
from hpc_grpo.system.say import not_worth_the_run
from hpc_grpo.system.usage import METER, Usage
from hpc_grpo.types import Minibatch, ParameterSpec, RemoteGroup, TrainSequence

if TYPE_CHECKING:
    from hpc_grpo.metrics.reductions import Reduction
    from hpc_grpo.types import Float32Array
    from hpc_grpo.weights.store import GroupMembership, StoredVersion, StoreSpec


WRITING = "writing"
"""The concurrency group of calls that write a checkpoint beside training, on their own thread."""

WATCHING = "watching"
"""The concurrency group of calls that ask about training while it runs."""


class LearnerActor:
    """The driver makes it a Ray actor. Methods of a concurrency group run one at a time, in the order of the calls."""

    def __init__(
        self, config: Config, rank: int, world_size: int, total_optimizer_steps: int, keeper: Any = None
    ) -> None:
        """`keeper`: the Ray actor that serves the head's disk to a node without that disk (run/keeper.py)."""
        dump_stacks_on_signal("learner")
        PULSE.open("learner", patience_of_actor(config))
        # Call this before the import of torch, whose threads inherit the cores.
        if said := keep_near_gpus():
            print(said, flush=True)
        self._config, self._keeper, self._algorithm = config, keeper, algorithm_of(config)
        self._rank, self._world_size, self._total_optimizer_steps = rank, world_size, total_optimizer_steps

    def start(self, rendezvous: Any) -> None:
        """Join the other learners at the actor `rendezvous` (None for a single learner), and load the model."""
        from hpc_grpo.learner.checkpoint import read_template
        from hpc_grpo.learner.group import RendezvousStore
        from hpc_grpo.learner.head_disk import disk_of
        from hpc_grpo.learner.learner import Learner

        def call(method: str, *args: Any) -> Any:
            return ray.get(getattr(rendezvous, method).remote(*args))

        # Keep a reference: torch keeps only the part of the store that is not Python.
        self._store = RendezvousStore(call) if rendezvous is not None else None
        self._learner = Learner(self._config, self._rank, self._world_size, self._store, self._total_optimizer_steps)
        for file in self._config.data.chat_templates.values() if self._rank == 0 else ():
            read_template(file)
        if self._learner.device.type == "cuda":
            METER.watch_gpus()
        self._learner.files.disk = disk_of(self._keeper, self._config.run_path)

    def train(
        self,
        minibatches: Sequence[Minibatch[RemoteGroup | TrainSequence]],
        record: Path | None,
        measured: Sequence[RemoteGroup] | None,
    ) -> dict[str, Reduction]:
        """Train on this learner's share of a step. `record`: a folder to save the share in. `measured`: see `Batch`."""
        with PULSE.working("train"):
            fetched = [
                Minibatch(tuple(self._sequences(each.sequences)), each.num_valid_tokens, each.num_sequences)
                for each in minibatches
            ]
            degree = self._config.train.sequence_parallel
            if record is not None and self._rank % degree == 0:
                from hpc_grpo.learner.record import save_share

                disk, share = self._learner.files.disk, (self._rank // degree, self._world_size // degree)
                # Does not wait for disk space: a learner hears of no request to stop.
                with not_worth_the_run("The step's batch was not kept"):
                    save_share(disk, record, *share, fetched)
            return self._learner.train_step(fetched, None if measured is None else self._sequences(measured))

    def microbatches(self) -> tuple[int, int]:
        """Return the step's number of trained microbatches, and of all microbatches. Call it in the group WATCHING."""
        return self._learner.microbatches

    def usage(self) -> Usage:
        """Return the usage since the last call. `busy_s` excludes waits for other learners."""
        return METER.read()

    def start_profile(self) -> None:
        self._stacks, self._trace = StackProfile(), TorchTrace()

    def stop_profile(self) -> dict[str, bytes]:
        return {"stacks.html": self._stacks.stop(), "trace.json.gz": self._trace.stop()}

    def free_cached_memory(self) -> None:
        """Free torch's cached GPU memory for the engine that shares the GPU."""
        import torch

        torch.cuda.empty_cache()  # does nothing without a GPU

    def stage_checkpoint(self, path: Path, driver_state: dict[str, Any], behind: bool) -> None:
        from hpc_grpo.learner.checkpoint import CheckpointWriter

        self._writer = CheckpointWriter(self._learner, path, driver_state, behind=behind)

    def write_checkpoint(self) -> tuple[FileEntry, ...]:
        return self._writer.write()

    def publish_checkpoint(self, *shares: tuple[FileEntry, ...]) -> float:
        """Complete the checkpoint after all learners have written. Return the seconds since its staging began.

        `shares` are the return values of all learners' `write_checkpoint`.
        """
        return self._writer.publish(shares)

    def write_universal(self, path: Path) -> None:
        from hpc_grpo.learner.checkpoint import write_universal

        write_universal(path)

    def load_checkpoint(self, path: Path) -> None:
        from hpc_grpo.learner.checkpoint import load_checkpoint

        load_checkpoint(self._learner, path)

    def export(self, path: Path) -> None:
        from hpc_grpo.learner.checkpoint import export_model

        export_model(self._learner, path)

    def parameter_specs(self) -> list[ParameterSpec]:
        return self._learner.parameter_specs()

    def open_weight_store(self, spec: StoreSpec, *, writes: bool) -> Path | None:
        """Prepare to publish. With `writes`, create the node's store and return its folder; otherwise return None."""
        from hpc_grpo.learner.model import gathered
        from hpc_grpo.learner.publish import WeightPublisher
        from hpc_grpo.weights.cuda import open_store
        from hpc_grpo.weights.node_group import RENDEZVOUS

        folder = store = None
        if writes:
            folder = Path(os.environ.get(SHM_DIR_VARIABLE) or tempfile.mkdtemp(prefix="hpc-grpo-", dir="/dev/shm"))
            # Remove the file of an earlier driver: its addresses would be mistaken for this group's.
            (folder / RENDEZVOUS).unlink(missing_ok=True)
            store = open_store(folder, spec, create=True)
        self._publisher = WeightPublisher(spec.layout, partial(gathered, self._learner.model), store)
        return folder

    def join_weight_group(self, membership: GroupMembership) -> None:
        from hpc_grpo.weights.node_group import NodeGroup

        self._publisher.group = NodeGroup(membership)

    def stage_weights(self, version: int) -> StoredVersion | None:
        return self._publisher.stage(version)

    def announce_weights(self) -> None:
        self._publisher.announce()

    def score(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int]], images: tuple[bytes, ...]
    ) -> list[Float32Array]:
        """Return the logprobs `[C]` of the tokens of each completion of `prompt`, in nats."""
        from hpc_grpo.learner.learner import score_apart

        with PULSE.working("publish"):
            return score_apart(self._learner.model, prompt, completions, self._learner.device, images)

    def _sequences(self, items: Sequence[RemoteGroup | TrainSequence]) -> list[TrainSequence]:
        """Return the sequences of groups, which are fetched. Demonstrations are sequences already."""
        sequences = [item for item in items if isinstance(item, TrainSequence)]
        groups = [item for item in items if isinstance(item, RemoteGroup)]
        for group, samples in zip(groups, ray.get([group.samples for group in groups]), strict=True):
            if samples.images:
                samples = replace(samples, images=ray.get(samples.images))
            sequences += self._algorithm.sequences(samples, group.advantages, group.valid)
        return sequences
