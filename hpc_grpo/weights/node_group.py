"""One node's weight group: the publishing learner and the node's engine workers, over Gloo on loopback.

The group carries the announcement of a version (number and checksums) and each worker's acknowledgement. Groups stay
inside a node, because a death breaks the complete group, and a full mesh costs a socket per pair. Members meet through
a file in node-local shared memory, so no port is open to strangers.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.weights.store import PUBLISHER_RANK, GroupMembership, StoredVersion

LOAD_FAILED = -1  # acknowledged instead of a version
RENDEZVOUS = "rendezvous"  # the file in the store's folder through which members find each other


class NodeGroup:
    """Carries announcements to the workers and acknowledgements back. Every wait has the membership's deadline."""

    def __init__(self, membership: GroupMembership) -> None:
        self._membership = membership
        store = dist.FileStore(str(membership.folder / RENDEZVOUS), membership.size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=membership.deadline_s)
        store.set_timeout(options._timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        prefixed = dist.PrefixStore(f"weights-{membership.generation}", store)
        try:
            self._group = dist.ProcessGroupGloo(prefixed, membership.rank, membership.size, options)
        except RuntimeError as error:
            raise self._error("did not form", error) from error

    def announce(self, stored: StoredVersion) -> None:
        """Tell every worker the version in the store. Only the publisher calls this."""
        self._broadcast(torch.tensor([stored.version, *stored.checksums], dtype=torch.int64))

    def receive_announcement(self, num_blocks: int) -> StoredVersion:
        message = torch.empty(1 + num_blocks, dtype=torch.int64)
        self._broadcast(message)
        version, *checksums = message.tolist()
        return StoredVersion(version, tuple(checksums))

    def acknowledge(self, loaded_version: int) -> list[int]:
        """Send this member's version, or LOAD_FAILED, to all members; return the values of all, by rank."""
        own = torch.tensor([loaded_version], dtype=torch.int64)
        answers = [torch.empty(1, dtype=torch.int64) for _ in range(self._membership.size)]
        self._wait(self._group.allgather([answers], [own]))
        return [int(answer) for answer in answers]

    def _broadcast(self, message: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = PUBLISHER_RANK
        self._wait(self._group.broadcast([message], options))

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._error("broke", error) from error

    def _error(self, what: str, cause: RuntimeError) -> WeightSyncError:
        return WeightSyncError(f"the node's weight group {what} at rank {self._membership.rank}: {cause}")
