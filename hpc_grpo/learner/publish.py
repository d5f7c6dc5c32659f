"""The learner's side of a publish; the engine's is `engine/receive.py`, what both share is in `weights/`.

Waits for the node's engine workers, which acknowledge that they hold a version, up to the group's deadline. `stage`
overlaps generation, since engines hold their own copy; only `announce` needs them to pause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.weights.buckets import BucketLayout
from hpc_grpo.weights.node_group import PUBLISHER_RANK, NodeGroup
from hpc_grpo.weights.store import StoredVersion, WeightStore

Gather = Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]]


class WeightPublisher:
    """Writes versions into a node's store. Under ZeRO-3 all learners gather, also those without a store to write."""

    def __init__(self, layout: BucketLayout, gather: Gather, store: WeightStore | None) -> None:
        self._layout = layout
        self._gather = gather
        self._store = store
        self._group: NodeGroup | None = None
        self._staged: StoredVersion | None = None
        self._current_buffer = -1

    def join(self, group: NodeGroup) -> None:
        self._group = group

    def stage(self, version: int) -> None:
        """Gather the parameters and write them as `version`; engines go on with the version they hold."""
        # Buffers alternate by publish, not by version: versions count optimizer steps, and may advance by two.
        buffer = (self._current_buffer + 1) % (self._store.num_buffers if self._store else 1)
        checksums = []
        for bucket in self._layout.buckets:
            with self._gather(bucket.names) as parameters:
                if self._store is not None:
                    for name, view in self._store.tensors(buffer, bucket):
                        view.copy_(parameters[name])
                    checksums.append(self._store.checksum(buffer, bucket))
        self._staged = StoredVersion(version, buffer, tuple(checksums))

    def announce(self) -> None:
        """Have the node's engines load what was staged. Raises WeightSyncError when one fails, dies or is too late."""
        if self._store is None:
            return
        if self._staged is None or self._group is None:
            raise WeightSyncError("announce was called before stage and join")
        version = self._staged.version
        self._group.announce(self._staged)
        answers = self._group.acknowledge(version)
        failed = [rank for rank, held in enumerate(answers) if held != version and rank != PUBLISHER_RANK]
        if failed:
            raise WeightSyncError(f"engine workers {failed} did not load weight version {version}")
        self._store.publish_header(self._staged)
        self._current_buffer = self._staged.buffer
