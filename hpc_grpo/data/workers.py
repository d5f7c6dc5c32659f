"""Encode batches of items in processes beside this one: the costly part of a first start, on every core.

The order is that of the items, so what comes of it is the same with any number of processes. They are programs of
their own, never forks: a fork of a process with threads (Ray's, gRPC's, the tokenizer's) may wait for ever for a lock
that no thread of it holds. Nor are they multiprocessing's, which imports the parent's main module first. Each ends at
the end of its input, so also when this process is killed; what it had encoded is lost, and the cache has none of it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpc_grpo.errors import ConfigError, HpcGrpoError

if TYPE_CHECKING:
    from hpc_grpo.data.encoder import Encoder, Row
    from hpc_grpo.data.sources.base import Item

Batch = tuple[Sequence["Item"], int]
"""Items, and the number of the first."""

MAX_PROCESSES = 8
"""This process reads the items and writes the rows: it is busy for a quarter of a process's time, so about that many
pay. Each takes up to 600 MiB, with the libraries that all share."""

_ALONE = 20
"""Batches that are encoded here first: less than a process takes to start."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[1].split(chr(10)); from hpc_grpo.data.workers import main; main()"


def encode_batches(
    encoder: Encoder, batches: Iterator[Batch], num_processes: int | None = None, num_alone: int = _ALONE
) -> Iterator[list[Row]]:
    """Yield the rows of each batch, in order; null processes: one for each core that this process may use.

    Raises ConfigError for the first item that cannot be used, HpcGrpoError when a process ended by itself.
    """
    for items, first in islice(batches, num_alone):
        yield encoder.encode(items, first)
    if num_processes is None:
        num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if num_processes == 1:
        for items, first in batches:
            yield encoder.encode(items, first)
        return
    workers: list[_Worker] = []
    try:
        for batch in islice(batches, num_processes):
            workers.append(_Worker(encoder))
            workers[-1].send(batch)
        while workers:
            # In turns, and fed again before its rows are looked at: none waits for what is done with them.
            worker = workers[0]
            answer = worker.receive()
            del workers[0]
            if (following := next(batches, None)) is None:
                worker.end()
            else:
                worker.send(following)
                workers.append(worker)
            yield _rows(answer)
    finally:
        for worker in workers:
            worker.end()


def _rows(answer: bytes) -> list[Row]:
    rows: list[Row] | str = pickle.loads(answer)
    if isinstance(rows, str):
        raise ConfigError(rows)
    return rows


class _Worker:
    """A process that encodes. It has one batch at a time, so neither side waits for the other to empty a pipe."""

    def __init__(self, encoder: Encoder) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "\n".join(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The processes have the cores already.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self.send(encoder)

    def send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` tells how it ended
            _write(self._process.stdin, pickle.dumps(message))

    def receive(self) -> bytes:
        assert self._process.stdout is not None
        answer = _read(self._process.stdout)
        if answer is None:
            raise HpcGrpoError(
                f"A process that tokenizes data ended with exit code {self._process.wait()}; -9 is often a lack of "
                f"memory. Its own words are above. Start again; with fewer cores it starts fewer."
            )
        return answer

    def end(self) -> None:
        """Kill it: it holds nothing that is still wanted."""
        with suppress(BrokenPipeError), self._process:  # closing stdin writes what a dead process has not taken
            self._process.kill()


def main() -> None:
    """Encode the batches that arrive at stdin by the encoder that comes first, until the end of the input."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the parent to heed, where a group gets them
        signal.signal(sig, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints
        with suppress(BrokenPipeError):
            encoder: Encoder = pickle.loads(_read(sys.stdin.buffer) or b"")
            while (message := _read(sys.stdin.buffer)) is not None:
                try:
                    answer: list[Row] | str = encoder.encode(*pickle.loads(message))
                except ConfigError as error:
                    answer = str(error)
                _write(answers, pickle.dumps(answer))


def _write(stream: Any, content: bytes) -> None:
    stream.write(len(content).to_bytes(8, "big"))
    stream.write(content)
    stream.flush()


def _read(stream: Any) -> bytes | None:
    """Return the next message; None at the end, also in the middle of one."""
    header = stream.read(8)
    content: bytes = stream.read(int.from_bytes(header, "big")) if len(header) == 8 else b""
    return content if len(header) == 8 and len(content) == int.from_bytes(header, "big") else None
