r"""Compares answers in mathematical notation by math-verify: `\sqrt{8}` and `2\sqrt{2}`, sets, intervals, matrices.

Runs in a child of the reward worker: a simplification that never ends, or fills the memory, costs its own deadline and
one fork, and the other completions of the call go on. math-verify's own deadline is an alarm that Python handles
between two bytecodes, and so never in the middle of a power of huge integers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

# Here and not in the child: it is forked again after each answer that was stuck, and the import takes 0.6 s.
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from hpc_grpo.system.processes import tie_to_parent

_MAX_CHARACTERS = 1000
"""Longer answers are none; parsing takes time and stack with the length."""

_MAX_MEMORY_BYTES = 4 << 30
"""Address space that the child takes beyond the worker's, which may be any: a reward beside `math` may import torch."""

_FROM_NOTATION = (LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig())

# It warns that no alarm of its own is set: the deadline is here.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


class SymbolicJudge:
    """Asks a child process, which is started with the first question and again after each that killed it."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._connection: Connection | None = None

    def are_equal(self, given: str, answer: str, cpu_s: float) -> bool:
        """Tell whether `given` equals `answer`; False where either is no mathematics.

        Raises ChildProcessError where that takes more than `cpu_s` of processor time, or too much memory: a deadline
        on the clock would take a busy node for a hard question.
        """
        if max(len(given), len(answer)) > _MAX_CHARACTERS:
            return False
        connection = self._connection or self._start()
        try:
            connection.send((given, answer, cpu_s))
            return bool(connection.recv())
        except (EOFError, ConnectionError) as error:
            self.close()
            raise ChildProcessError(f"Comparing {given!r} and {answer!r} ended the process.") from error

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._child is not None and self._connection is not None:
            self._connection.close()
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        self._child = self._connection = None

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        parent = os.getpid()
        if (child := os.fork()) == 0:
            try:
                ours.close()
                _answer(theirs, parent)
            finally:
                os._exit(1)  # never back into the worker's loop
        theirs.close()
        self._child, self._connection = child, ours
        return ours


@lru_cache(maxsize=1)
def judge() -> SymbolicJudge:
    """Return this process's judge."""
    return SymbolicJudge()


def _answer(connection: Connection, parent: int) -> None:
    tie_to_parent(parent, signal.SIGKILL)
    most = _address_space_bytes() + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(EOFError):
        while True:
            given, answer, cpu_s = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # the kernel ends the process then, also inside C
            is_equal = _verify(given, answer)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send(is_equal)


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _verify(given: str, answer: str) -> bool:
    # Both are told to be notation, also where a text has no dollars; a box has been taken off already.
    found = parse(_as_notation(given), _FROM_NOTATION, parsing_timeout=None)
    wanted = parse(_as_notation(answer), _FROM_NOTATION, parsing_timeout=None)
    return bool(verify(wanted, found, timeout_seconds=None))


def _as_notation(text: str) -> str:
    return text if "$" in text or "\\(" in text or "\\[" in text else f"${text}$"
