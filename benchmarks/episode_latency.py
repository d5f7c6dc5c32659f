"""The share of the time in which an engine is idle while environments think, beside the least that is possible.

`python benchmarks/episode_latency.py`: 64 sessions of 8 turns at a time, three episodes each. A turn is 16 tokens of a
paced engine, which makes one token of each sequence every 10 ms. Environments answer after lognormal times (sigma 1),
twice a turn in the mean. The player, the dialogue and the environments' processes are those of a run
(`hpc_grpo/engine/episodes.py`). The bound is the same engine with the same times, where nothing else takes any. The
last columns are those of the simulated engine of `hpc-grpo plan` (`hpc_grpo/simulate/cluster.py`), with the same times.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import load_average, print_table

from hpc_grpo import Turn
from hpc_grpo.config import Config
from hpc_grpo.demo.model import make_tokenizer
from hpc_grpo.engine.episodes import EpisodePlayer
from hpc_grpo.simulate.cluster import Call, SimulatedEngine, Wave
from hpc_grpo.simulate.rates import Rate
from hpc_grpo.types import Completion, GroupRequest, SamplingSpec

SESSIONS, ROUNDS, TURNS, TOKENS, STEP_S = 64, 3, 8, 16, 0.01
LATENCY_S = 2 * TOKENS * STEP_S


def latency_s(session: int, turn: int) -> float:
    return LATENCY_S * math.exp(random.Random(session * TURNS + turn).gauss(-0.5, 1.0))


class Thinks:
    """Answers each turn after the time that its session and turn have."""

    async def reset(self, row, seed):
        self._session, self._turn = row["session"], 0
        return "Go."

    async def step(self, message):
        await asyncio.sleep(latency_s(self._session, self._turn))
        self._turn += 1
        return Turn("Go on.", done=self._turn == TURNS)


class PacedEngine:
    """Makes a token of each sequence every `STEP_S` seconds, of `slots` sequences at once."""

    def __init__(self, slots: int) -> None:
        self.slots, self.waiting, self.running = slots, deque[Future[Completion]](), dict[Future[Completion], int]()
        self.busy_s = 0.0

    async def sample(self, requests: Sequence[GroupRequest]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self.waiting.extend(futures)
        return futures

    async def run(self) -> None:
        ids, zeros = np.full(TOKENS, 70, np.int32), np.zeros(TOKENS, np.float32)
        due = time.monotonic()
        while True:
            while self.waiting and len(self.running) < self.slots:
                self.running[self.waiting.popleft()] = TOKENS
            due = max(due + STEP_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self.busy_s += STEP_S * bool(self.running)
            self.running = {future: left - 1 for future, left in self.running.items()}
            for future in [future for future, left in self.running.items() if not left]:
                del self.running[future]
                future.set_result(Completion(ids, zeros, ids * 0, "stop"))


async def played(slots: int, lag: int) -> tuple[float, float]:
    """Return the seconds of all episodes, and the share of them in which the engine had nothing to do."""
    environment = {"name": f"{Path(__file__).resolve()}:Thinks", "max_turns": TURNS, "max_tokens": 1000}
    config = Config.model_validate(
        {
            "run": {"name": "latency"},
            "model": {"path": "m"},
            "data": {"train": {"path": "d.jsonl"}, "template": "plain"},
            "environment": environment,
            "rollout": {"max_policy_lag": lag},
            "train": {"total_steps": 1},
        }
    )
    engine = PacedEngine(slots)
    player = EpisodePlayer(config, make_tokenizer(), engine.sample)
    pace, sampling = asyncio.create_task(engine.run()), SamplingSpec(TOKENS)

    def request(session: int) -> GroupRequest:
        return GroupRequest(session, (), (session,), sampling, environment=0, row={"session": session})

    for task in player.start([request(0), request(1)]):  # the processes of the environments are up then
        await task
    engine.busy_s, begun = 0.0, time.monotonic()
    if lag == 0:
        for number in range(ROUNDS):
            first = number * SESSIONS
            await asyncio.gather(*player.start([request(first + at) for at in range(SESSIONS)]))
    else:

        async def one_after_another(session: int) -> None:
            for number in range(ROUNDS):
                [task] = player.start([request(session + number * SESSIONS)])
                await task

        await asyncio.gather(*map(one_after_another, range(SESSIONS)))
    elapsed = time.monotonic() - begun
    pace.cancel()
    player.end_all()
    return elapsed, 1 - engine.busy_s / elapsed


def bound(slots: int, lag: int) -> tuple[float, float]:
    """Return the same of an engine for which all else takes no time, decode step by decode step."""
    away = [(0.0, session, 0) for session in range(SESSIONS)]  # when it asks, the episode, its turn
    waiting, running = deque[tuple[int, int]](), dict[tuple[int, int], int]()
    now = busy = 0.0
    while away or waiting or running:
        is_wave_due = lag > 0 or (not waiting and not running and max(away)[0] <= now)
        for ask in sorted(ask for ask in away if ask[0] <= now and is_wave_due):
            away.remove(ask)
            _, episode, turn = ask
            if turn < TURNS:
                waiting.append((episode, turn))
            elif episode + SESSIONS < SESSIONS * ROUNDS:
                waiting.append((episode + SESSIONS, 0))
        while waiting and len(running) < slots:
            running[waiting.popleft()] = TOKENS
        now, busy = now + STEP_S, busy + STEP_S * bool(running)
        running = {own: left - 1 for own, left in running.items()}
        for own in [own for own, left in running.items() if not left]:
            del running[own]
            away.append((now + latency_s(*own), own[0], own[1] + 1))
    return now, 1 - busy / now


def simulated(slots: int, lag: int) -> tuple[float, float]:
    """Return the same of the engine of a simulated run."""
    engine, now = SimulatedEngine(Rate(STEP_S, 0.0), slots), 0.0

    def begin(episodes: Sequence[int], wave: Wave | None = None) -> Call:
        turns = [[(TOKENS, latency_s(episode, turn)) for turn in range(TURNS)] for episode in episodes]
        return engine.submit(turns, now, wave=wave)

    if lag == 0:
        for number in range(ROUNDS):
            now = engine.end_of(begin(range(number * SESSIONS, (number + 1) * SESSIONS), Wave()))
        return now, 1 - engine.busy_s / now
    calls = {session: begin([session]) for session in range(SESSIONS)}
    while calls:
        now += STEP_S
        engine.advance(now)
        for episode in [episode for episode, call in calls.items() if not call.num_left]:
            del calls[episode]
            if (after := episode + SESSIONS) < SESSIONS * ROUNDS:
                calls[after] = begin([after])
    return now, 1 - engine.busy_s / now


def main() -> None:
    print(load_average())
    rows = []
    for lag in (1, 0):
        for slots in (64, 16):
            (elapsed, idle), (least, least_idle) = asyncio.run(played(slots, lag)), bound(slots, lag)
            way = "each by itself" if lag else "in waves"
            rows.append([way, str(slots), f"{elapsed:.1f} s", f"{least:.1f} s", f"{elapsed / least:.3f}"])
            rows[-1] += [f"{idle:.1%}", f"{least_idle:.1%}"]
            foretold, foretold_idle = simulated(slots, lag)
            rows[-1] += [f"{foretold:.1f} s", f"{foretold_idle:.1%}"]
    heads = ["turns", "slots", "time", "bound", "time / bound", "engine idle", "idle at the bound"]
    heads += ["simulated time", "simulated idle"]
    print_table(f"{SESSIONS} sessions x {ROUNDS} episodes x {TURNS} turns", heads, rows)


if __name__ == "__main__":
    main()
