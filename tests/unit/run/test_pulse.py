from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_grpo.metrics.record import BETWEEN
from hpc_grpo.run.contract import PULSE_VARIABLE, SHM_DIR_VARIABLE
from hpc_grpo.run.pulse import (
    ASKED_AGAIN,
    PULSES_NAME,
    Beat,
    Patience,
    Pulse,
    WakingClock,
    patience_of_actor,
    patience_of_driver,
    read_pulse,
)
from hpc_grpo.system.processes import start_time
from tests.support.configs import minimal_config

PATIENCE = Patience(least_s=60.0, other_s=1800.0, repeats=frozenset(["train"]), deadlines_s={"train": 3600.0})


class Clock(WakingClock):
    """Counts what the test lets pass."""

    def __init__(self, most_s: float = math.inf) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now, most_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    pulse = Pulse(clock)
    pulse.open("learner", PATIENCE)
    return pulse


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Beat]:
    """What a process that is told where publishes."""
    monkeypatch.setenv(PULSE_VARIABLE, str(tmp_path / "pulse"))

    def read() -> Beat:
        descriptor = os.open(tmp_path / "pulse", os.O_RDONLY)
        try:
            return read_pulse(descriptor)
        finally:
            os.close(descriptor)

    return read


def work(pulse: Pulse, clock: Clock, *pieces_s: float) -> None:
    with pulse.working("train"):
        for seconds in pieces_s:
            clock.now += seconds
            pulse.beat()


def test_every_sign_is_published_with_the_work_and_its_limit(published: Callable[[], Beat], clock: Clock) -> None:
    pulse = Pulse(clock)
    pulse.open("driver", PATIENCE)
    assert (published().work, published().limit_s) == ("", math.inf)
    with pulse.working("train"):
        first = published()
        assert (first.work, first.limit_s) == ("train", 3600.0)
        pulse.beat()
        assert published().count == first.count + 1
    assert (published().work, published().limit_s) == ("", math.inf)


def test_the_limit_follows_the_longest_pause_of_that_work_before(pulse: Pulse, clock: Clock) -> None:
    work(pulse, clock, 1.0, 20.0, 3.0)
    work(pulse, clock, 2.0)
    assert pulse.longest_s == {"train": 20.0}
    with pulse.working("train"):
        assert pulse._beat.limit_s == 200.0
    with pulse.working("sampling"):
        assert pulse._beat.limit_s == 1800.0


def test_a_slow_first_step_is_not_held_to_its_own_quick_pieces(pulse: Pulse, clock: Clock) -> None:
    with pulse.working("train"):
        clock.now += 0.1
        pulse.beat()
        assert pulse._beat.limit_s == 3600.0


def test_work_that_never_ends_is_held_to_what_it_has_shown(pulse: Pulse, clock: Clock) -> None:
    with pulse.working("train"):
        for _ in range(1000):
            clock.now += 0.01
            pulse.beat()
        assert pulse._beat.limit_s == 60.0


def test_a_suspended_job_teaches_nothing_of_how_long_its_work_takes() -> None:
    clock = Clock(most_s=10.0)
    pulse = Pulse(clock)
    pulse.open("driver", PATIENCE)
    work(pulse, clock, 2.0, 7200.0)  # nobody looked meanwhile: all threads of this process stood still
    assert pulse.longest_s["train"] <= 10.0


def test_what_an_attempt_before_has_measured_counts(clock: Clock) -> None:
    pulse = Pulse(clock)
    pulse.open("driver", PATIENCE, {"train": 30.0})
    with pulse.working("train"):
        assert pulse._beat.limit_s == 300.0


def test_an_actor_publishes_below_the_shared_memory_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv(SHM_DIR_VARIABLE, str(tmp_path))
    Pulse(clock).open("engine", PATIENCE)  # no agent watches: no folder
    (tmp_path / PULSES_NAME).mkdir()
    Pulse(clock).open("engine", PATIENCE)
    (path,) = tmp_path.rglob("*-*")
    assert path.name == f"engine-{os.getpid()}-{start_time(os.getpid())}"
    assert path.stat().st_mode & 0o777 == 0o600


def test_rewards_that_wait_make_nobody_late() -> None:
    """A judge that another machine runs may take its whole deadline for a group, and again with another worker."""
    config = minimal_config(rewards=[{"name": "m:judge", "timeout_s": 900.0}, {"name": "m:other", "timeout_s": 30.0}])
    driver, actor = patience_of_driver(config), patience_of_actor(config)
    for patience, waits in ((driver, "generate_wait"), (driver, ASKED_AGAIN), (driver, "eval"), (actor, "grading")):
        assert patience.limit_s(waits, 1.0) > 2 * 930.0
    assert actor.limit_s("sampling", 1.0) == 60.0


@pytest.mark.parametrize(
    ("phase", "starts", "repeats"),
    [
        ("start", 1, False),
        ("generate_wait", 4, True),
        ("train", 4, True),
        ("eval", 8, True),
        ("resume", 8, False),
        ("checkpoint", 2, False),
    ],
)
def test_each_phase_has_its_own_deadline_and_what_repeats_is_late_sooner_once_it_is_known(
    phase: str, starts: int, repeats: bool
) -> None:
    """A fresh run resumes in no time, and a later one loads a terabyte; a checkpoint may wait for the one before. The
    model's files may come from a node's memory in one start, and from a busy file system in the next."""
    config = minimal_config(deadlines={"start_s": 100.0, "silent_s": 1.0})
    patience = patience_of_driver(config)
    waits_s = patience.extra_s.get(phase, 0.0)
    assert patience.limit_s(phase, None) == 100.0 * starts + waits_s
    assert patience.limit_s(phase, 1.0) == (10.0 if repeats else 100.0 * starts) + waits_s


def test_a_publish_has_its_own_deadline_first() -> None:
    config = minimal_config(deadlines={"silent_s": 1000.0})
    assert patience_of_driver(config).limit_s("publish", 1.0) > config.deadlines.publish_s == 2000.0


@pytest.mark.parametrize("part", ["inputs", "connect", "weights", BETWEEN])
def test_quick_parts_of_the_start_teach_nothing_of_slow_ones(part: str) -> None:
    patience = patience_of_driver(minimal_config())
    assert patience.limit_s(part, 0.01) == minimal_config().deadlines.start_s
