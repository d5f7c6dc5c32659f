from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hpc_grpo.driver import remote
from hpc_grpo.run.contract import ENDS_AT_VARIABLE
from tests.support.ray_futures import FakeRay

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back the handlers that a StopRequest takes, and know of no end of an allocation."""
    monkeypatch.delenv(ENDS_AT_VARIABLE, raising=False)
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Futures in the place of Ray's references, wherever the driver waits."""
    fake = FakeRay()
    monkeypatch.setattr(remote, "ray", fake)
    return fake
