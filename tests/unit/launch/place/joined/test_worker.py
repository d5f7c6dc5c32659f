"""A worker ends with its own exit code, whatever comes while it does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.launch.place.joined.worker import Worker
from hpc_grpo.run.paths import RunDir


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_does_not_change_the_exit_code_of_a_worker_that_ends(tmp_path: Path) -> None:
    worker = Worker(RunDir(tmp_path), "127.0.0.1", 1, lambda: True)
    assert worker.serve() == 0
    signal.raise_signal(signal.SIGTERM)
    assert not [*RunDir(tmp_path).members.glob("*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_worker_that_waits_for_its_head(tmp_path: Path, number: int) -> None:
    def is_over() -> bool:
        signal.raise_signal(number)
        return False

    assert Worker(RunDir(tmp_path), "127.0.0.1", 1, is_over).serve() == 75
