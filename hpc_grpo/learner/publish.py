"""The learner's side of a publish; the engine's is `engine/receive.py`, what both share is in `weights/`.

Waits for the node's engine workers, which acknowledge that they hold a version, up to the group's deadline. `stage`
overlaps generation, since engines hold their own copy, and so do the engines' checksums of what was staged; only
`announce` needs them to pause.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import torch

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.weights.cuda import SideStream
from hpc_grpo.weights.node_group import PUBLISHER_RANK, NodeGroup
from hpc_grpo.weights.store import BucketLayout, StoredVersion, WeightStore

Gather = Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]]

_MAX_THREADS = 8
"""More fill no memory's bandwidth, and engines may be sampling on the other cores."""


class WeightPublisher:
    """Writes versions into a node's store. Under ZeRO-3 all learners gather, also those without a store to write."""

    def __init__(self, layout: BucketLayout, gather: Gather, store: WeightStore | None) -> None:
        self.group: NodeGroup
        """Set once the engines of the node are there, and again where one was replaced."""
        self._layout = layout
        self._gather = gather
        self._store = store
        self._staged: StoredVersion

    def stage(self, version: int) -> StoredVersion | None:
        """Gather the parameters and write them as `version`; engines go on with the version they hold.

        Returns what engines are to find in the store; None where another learner of the node writes it.
        """
        store = self._store
        checksums: list[Future[int]] = []
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "stage-weights") as threads:
            for bucket in self._layout.buckets:
                # Parameters are needed until they are copied; checksums of the copy may come later.
                with self._gather(bucket.names) as parameters:
                    if store is None:
                        continue
                    if any(parameters[name].is_cuda for name in bucket.names):
                        self._stream.copy((view, parameters[name]) for name, view in store.tensors(bucket))
                        checksums += [threads.submit(store.checksum, block) for block in bucket.blocks]
                    else:
                        writing = [threads.submit(store.write, block, parameters) for block in bucket.blocks]
                        wait(writing)
                        checksums += writing
        if store is None:
            return None
        self._staged = StoredVersion(version, tuple(each.result() for each in checksums))
        return self._staged

    @functools.cached_property
    def _stream(self) -> SideStream:
        return SideStream()

    def announce(self) -> None:
        """Have the node's engines load what was staged. Raises WeightSyncError when one fails, dies or is too late."""
        if self._store is None:
            return
        version = self._staged.version
        self.group.announce(self._staged)
        answers = self.group.acknowledge(version)
        failed = [rank for rank, held in enumerate(answers) if held != version and rank != PUBLISHER_RANK]
        if failed:
            raise WeightSyncError(f"engine workers {failed} did not load weight version {version}")
        self._store.publish_header(self._staged)
