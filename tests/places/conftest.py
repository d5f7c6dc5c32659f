"""Beds of machines for the tests of places: up for a module, taken down after it, with nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.outcomes import Outcome, print_table
from tools.virtual_machines import host, lifecycle, packages
from tools.virtual_machines.bed_layout import BedLayout, Shape
from tools.virtual_machines.beds import Bed, Residue
from tools.virtual_machines.errors import UnavailableError

_QUIET_DEADLINE_S = 30.0
_POLL_S = 0.2


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"after {deadline_s:.0f} s still not true: {what}")
        time.sleep(_POLL_S)


def residue_of(bed: Bed, deadline_s: float = _QUIET_DEADLINE_S) -> dict[str, Residue]:
    """What is left on machines that ought to be idle, after the time that it may take to end."""
    end = time.monotonic() + deadline_s
    while True:
        left = {name: found for name in bed.names if (found := bed.residue(name))}
        if not left or time.monotonic() > end:
            return left
        time.sleep(_POLL_S)


@contextmanager
def bed_of(shape: Shape) -> Iterator[Bed]:
    """A bed for the block. Its machines must be idle and empty at the end: a failure of the block comes first."""
    host.use_daemon_path(*packages.folders())
    state = BedLayout.from_environment().state
    # Beds of several kinds may be up at once, and beside one of a developer's.
    layout = BedLayout(state.with_name(f"{state.name}-test-{shape.kind}{'-private' * shape.private_disks}"))
    try:
        lifecycle.take_down(layout)  # of a session that was killed
        bed = Bed.bring_up(layout, shape)
    except UnavailableError as error:
        pytest.skip(str(error))
    try:
        yield bed
        left = residue_of(bed)
    finally:
        bed.take_down()
    assert left == {}


@pytest.fixture(scope="module")
def pods() -> Iterator[Bed]:
    """Three pods, `pod1` the head."""
    with bed_of(Shape("pods", 3)) as bed:
        yield bed


@pytest.fixture(scope="module")
def private_pods() -> Iterator[Bed]:
    """Two pods, each with a disk of its own."""
    with bed_of(Shape("pods", 2, private_disks=True)) as bed:
        yield bed


@pytest.fixture(scope="module")
def hosts() -> Iterator[Bed]:
    """Two hosts with sshd."""
    with bed_of(Shape("hosts", 2)) as bed:
        yield bed


@pytest.fixture(scope="module")
def vms() -> Iterator[Bed]:
    """Three VMs of four GPUs, and their controller."""
    with bed_of(Shape("vms", 3)) as bed:
        yield bed


_outcomes: list[tuple[str, Outcome]] = []


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Outcome], None]:
    """Keep what became of a run for the table that is printed at the end."""
    return lambda outcome: _outcomes.append((request.node.name.removeprefix("test_"), outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_table(terminalreporter, _outcomes)
