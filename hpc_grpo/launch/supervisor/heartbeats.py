"""Keeps the leases of node agents up, from a thread that touches no disk.

A shared file system may stall for minutes, and the supervisor's main thread with it, in a write to a log or in a look
at the run directory. That is no reason for the agents to take it for dead. The thread starts no process: the kernel
would tie its parent-death signal to the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hpc_grpo.launch.supervisor.agent_link import NodeLink

HEARTBEAT_S = 5.0


class Heartbeats:
    """Sends every agent a sign of life from the start to `stop`."""

    def __init__(self, links: Sequence[NodeLink]) -> None:
        self._links = links
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After it no agent is written to any more, so that its pipe can be closed."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            for link in self._links:
                link.heartbeat()
