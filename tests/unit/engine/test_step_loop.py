from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hpc_grpo.engine.actor import StepLoop

DEADLINE_S = 60.0


class Counter:
    """Each job takes some steps; every step waits until the test lets it through."""

    def __init__(self, gated: bool = False) -> None:
        self.gate = threading.Event()
        if not gated:
            self.gate.set()
        self.in_step = threading.Event()
        self.stepping = False
        self.jobs: list[tuple[int, Future[int]]] = []
        self.num_steps = self.in_flight = 0
        self.fail_at: int | None = None

    def has_work(self) -> bool:
        return bool(self.jobs)

    def drain(self) -> None:
        self.in_flight = 0

    def add(self, num_steps: int) -> Future[int]:
        self.jobs.append((self.num_steps + num_steps, Future()))
        return self.jobs[-1][1]

    def step(self) -> None:
        self.stepping = True
        self.in_step.set()
        assert self.gate.wait(DEADLINE_S)
        self.num_steps += 1
        self.in_flight += 1
        self.stepping = False
        if self.num_steps == self.fail_at:
            failure = RuntimeError("out of blocks")
            for _, future in self.jobs:
                future.set_exception(failure)
            self.jobs.clear()
            raise failure
        for ends_at, future in [job for job in self.jobs if job[0] <= self.num_steps]:
            self.jobs.remove((ends_at, future))
            future.set_result(self.num_steps)


def loop_of(make: Callable[[], Any]) -> Any:
    """Counters stand for samplers here."""
    return StepLoop(make)


def started(counter: Counter) -> Any:
    loop = loop_of(lambda: counter)
    assert loop.wait_ready() is counter
    return loop


def test_calls_run_between_steps_after_those_in_flight_and_work_goes_on() -> None:
    counter = Counter(gated=True)
    loop = started(counter)
    job = loop.call(lambda counter: counter.add(3)).result(DEADLINE_S)
    assert counter.in_step.wait(DEADLINE_S)
    update = loop.call(lambda each: (each.stepping or each.in_flight, threading.current_thread().name, job.done()))
    assert not update.done()
    counter.gate.set()
    stepping, thread, finished = update.result(DEADLINE_S)
    assert not stepping, "the call ran inside a step"
    assert thread == "engine-steps"
    assert not finished
    assert job.result(DEADLINE_S) == 3


def test_calls_run_in_the_order_given() -> None:
    loop = started(Counter())
    seen: list[int] = []
    calls = [loop.call(lambda _, number=number: seen.append(number)) for number in range(20)]
    for call in calls:
        call.result(DEADLINE_S)
    assert seen == list(range(20))


def test_failing_step_fails_all_who_wait_and_the_loop_lives_on() -> None:
    counter = Counter()
    counter.fail_at = 2
    loop = started(counter)
    jobs = loop.call(lambda counter: [counter.add(5), counter.add(7)]).result(DEADLINE_S)
    for job in jobs:
        with pytest.raises(RuntimeError, match="out of blocks"):
            job.result(DEADLINE_S)
    assert loop.call(lambda _: "alive").result(DEADLINE_S) == "alive"


def test_failing_call_fails_its_caller_alone() -> None:
    counter = Counter()
    loop = started(counter)

    def fail(_: Counter) -> Any:
        raise ValueError("bad weights")

    with pytest.raises(ValueError, match="bad weights"):
        loop.call(fail).result(DEADLINE_S)
    assert loop.call(lambda counter: counter.add(1)).result(DEADLINE_S).result(DEADLINE_S) == 1


def test_failure_to_make_the_engine_reaches_those_who_wait_for_it_or_call_it() -> None:
    def fail() -> Counter:
        raise OSError("no such model")

    loop = loop_of(fail)
    for use in (loop.wait_ready, *2 * [lambda: loop.call(lambda counter: counter.num_steps).result(DEADLINE_S)]):
        with pytest.raises(OSError, match="no such model"):
            use()
