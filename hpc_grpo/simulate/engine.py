"""A simulated engine: when its completions end. Nothing runs, so a day passes in seconds.

It has a time of its own: the driver's where something is submitted, and as far ahead as somebody waits for its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class Call:
    """One group: ends with its last completion."""

    num_left: int
    ended_at: float = 0.0


class SimulatedEngine:
    """Samples as vLLM does: sequences in the order they came, `max_num_seqs` at once, a token of each a decode step."""

    def __init__(self, decoding: Callable[[float], float], max_num_seqs: int) -> None:
        self._decoding = decoding
        self._max_num_seqs = max_num_seqs
        self._factor = 1.0
        self._time = 0.0
        self._steps = 0.0
        self._order = itertools.count()
        self._running: list[tuple[float, int, Call]] = []
        self._waiting: deque[tuple[int, Call]] = deque()
        self._num_open = 0
        self.busy_s = 0.0

    def load(self, now: float) -> int:
        """Count the groups that have not ended by then."""
        self._advance(now)
        return self._num_open

    def submit(self, lengths: Sequence[int], now: float, factor: float = 1.0) -> Call:
        """Queue completions of so many tokens; `factor` is on the seconds of what is sampled from now on."""
        self._advance(now)
        self._factor = factor
        call = Call(len(lengths), now)
        self._num_open += 1
        self._waiting.extend((length, call) for length in lengths)
        self._admit()
        return call

    def end_of(self, call: Call) -> float:
        """Sample until `call` has ended; return when that was."""
        while call.num_left:
            self._finish_next()
        return call.ended_at

    def finish_all(self, until: float) -> None:
        """Sample what there is, up to a time."""
        self._advance(until)

    def _advance(self, until: float) -> None:
        while self._running and self._time < until:
            step_s = self._step_s()
            if self._time + (self._running[0][0] - self._steps) * step_s > until:
                self._steps += (until - self._time) / step_s
                self.busy_s += until - self._time
                self._time = until
                return
            self._finish_next()
        self._time = max(self._time, until)

    def _finish_next(self) -> None:
        steps, _, call = self._running[0]
        seconds = (steps - self._steps) * self._step_s()
        heapq.heappop(self._running)
        self._steps = steps
        self._time += seconds
        self.busy_s += seconds
        call.num_left -= 1
        call.ended_at = self._time
        self._num_open -= not call.num_left
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            length, call = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + length, next(self._order), call))

    def _step_s(self) -> float:
        return self._factor * self._decoding(len(self._running))
