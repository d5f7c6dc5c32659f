"""Encode batches of items in other processes, on every core. Encoding is the slow part of a first start.

Rows keep the order of the items, whatever the number of processes. Each process is a new program, not a fork as in
`datasets.map`: a fork of a process with threads (Ray's, gRPC's, the tokenizer's) may wait forever for a lock.
multiprocessing does not start the processes, because it would import the parent's main module. A process ends when its
connection closes, also if this process is killed.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.system.processes import start_program

if TYPE_CHECKING:
    from hpc_grpo.data.cache import Row
    from hpc_grpo.data.encoder import Encoder
    from hpc_grpo.data.sources import Item

Batch = tuple[Sequence["Item"], int]
"""Items, and the number of the first."""

MAX_PROCESSES = 8
"""Most workers. More would wait for this process, which reads items and writes rows for a quarter of a worker's time.

Each worker needs up to 600 MiB, including libraries that all share.
"""

_ALONE = 20
"""Batches that this process encodes first: a worker needs more time to start."""


def encode_batches(
    encoder: Encoder, batches: Iterator[Batch], num_processes: int | None = None, num_alone: int = _ALONE
) -> Iterator[list[Row]]:
    """Yield the rows of each batch, in order. `num_processes` None: one for each core that this process may use.

    Raises ConfigError for the first item that cannot be used, HpcGrpoError if a process dies.
    """
    if num_processes is None:
        num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    for items, first in islice(batches, None if num_processes == 1 else num_alone):
        yield encoder.encode(items, first)
    workers: deque[_Worker] = deque()
    try:
        for batch in islice(batches, num_processes):
            workers.append(_Worker(encoder))
            workers[-1].send(batch)
        while workers:
            # Sends the next batch before it reads the rows of the last one, so that no worker is idle.
            rows = workers[0].receive()
            if (following := next(batches, None)) is None:
                workers.popleft().end()
            else:
                workers[0].send(following)
                workers.rotate(-1)
            if isinstance(rows, str):
                raise ConfigError(rows)
            yield rows
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that encodes. It has one batch at a time, so that neither side blocks on a full pipe."""

    def __init__(self, encoder: Encoder) -> None:
        environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # the processes use all cores already
        self._process, ours = start_program("hpc_grpo.data.workers", environ, output=2)  # for libraries' output
        self._connection = Connection(ours.detach())
        self.send(encoder)

    def send(self, message: Any) -> None:
        with suppress(ConnectionError):  # `receive` reports how the process ended
            self._connection.send(message)

    def receive(self) -> list[Row] | str:
        """Return the rows of a batch, or why an item cannot be used."""
        try:
            found: list[Row] | str = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise HpcGrpoError(
                f"A process that tokenizes data ended with exit code {self._process.wait()}; -9 is often a lack of "
                f"memory. Its output is above. Start again; with fewer cores, fewer processes start."
            ) from error
        return found

    def end(self) -> None:
        """Kill the process: nothing in it is needed any more."""
        with self._process, self._connection:
            self._process.kill()


def main(descriptor: int, _parent_pid: int) -> None:
    """Receive the encoder, then encode batches until the connection ends."""
    # The parent handles signals: a scheduler may signal all processes of a job.
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(sig, signal.SIG_IGN)
    with Connection(descriptor) as connection, suppress(EOFError, ConnectionError):
        encoder: Encoder = connection.recv()
        while True:
            items, first = connection.recv()
            try:
                connection.send(encoder.encode(items, first))
            except ConfigError as error:
                connection.send(str(error))
