"""The learner's side of a publish. The engine's side is `engine/receive.py`; shared code is in `weights/`.

Engines sample during `stage` and while they verify checksums, because they hold their own copy of the weights. They
pause only for `announce`, which waits until the node's engine workers acknowledge the version, at most until the
group's deadline.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import torch

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.weights.cuda import copy_on
from hpc_grpo.weights.node_group import NodeGroup
from hpc_grpo.weights.store import PUBLISHER_RANK, BucketLayout, StoredVersion, WeightStore

Gather = Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]]

_MAX_THREADS = 8
"""More threads do not copy faster, and engines may be sampling on the other cores."""


class WeightPublisher:
    """Writes versions into a node's store. Under ZeRO-3 all learners gather parameters, also those without a store."""

    def __init__(self, layout: BucketLayout, gather: Gather, store: WeightStore | None) -> None:
        self.group: NodeGroup
        """Set when the engines of the node are up, and again after an engine was replaced."""
        self._layout = layout
        self._gather = gather
        self._store = store
        self._staged: StoredVersion

    def stage(self, version: int) -> StoredVersion | None:
        """Gather the parameters and write them as `version`. Engines continue with the version they hold.

        Returns the version and its checksums; None if another learner of the node writes the store.
        """
        store = self._store
        checksums: list[Future[int]] = []
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "stage-weights") as threads:
            for bucket in self._layout.buckets:
                # Parameters must stay gathered until they are copied. Checksums of the copy may follow later.
                with self._gather(bucket.names) as parameters:
                    if store is None:
                        continue
                    if any(parameters[name].is_cuda for name in bucket.names):
                        copy_on(self._stream, ((view, parameters[name]) for name, view in store.tensors(bucket)))
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
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def announce(self) -> None:
        """Let the node's engines load the staged version. Does nothing without a store.

        Raises WeightSyncError if an engine fails, dies or misses the deadline.
        """
        if self._store is None:
            return
        version = self._staged.version
        self.group.announce(self._staged)
        answers = self.group.acknowledge(version)
        failed = [rank for rank, held in enumerate(answers) if held != version and rank != PUBLISHER_RANK]
        if failed:
            raise WeightSyncError(f"engine workers {failed} did not load weight version {version}")
        self._store.publish_header(self._staged)
