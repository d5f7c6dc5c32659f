"""Waiting on Ray, with futures in the place of its references."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from hpc_grpo.driver import remote
from hpc_grpo.driver.remote import Deadline, first_error, get_all
from hpc_grpo.errors import LaunchError, RewardError, WeightSyncError

Reference = Future[Any]
TEN_SECONDS = Deadline(10.0, "weights.deadline_s")


def fake_wait(references: Sequence[Reference], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
    assert num_returns == 1
    done = wait(references, timeout, return_when=FIRST_COMPLETED).done
    first = [reference for reference in references if reference in done][:1]
    return first, [reference for reference in references if reference not in first]


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ray", SimpleNamespace(wait=fake_wait, get=lambda reference: reference.result()))


def value(result: Any) -> Reference:
    reference: Reference = Future()
    reference.set_result(result)
    return reference


def failure(cause: Exception) -> Reference:
    """A call that raised `cause` in its actor, as Ray hands it over."""
    reference: Reference = Future()
    reference.set_exception(RayTaskError("publish", "traceback", cause).as_instanceof_cause())
    return reference


def death() -> Reference:
    reference: Reference = Future()
    reference.set_exception(ActorDiedError())
    return reference


def later(reference: Reference, error: Exception, delay_s: float) -> Reference:
    threading.Timer(delay_s, reference.set_exception, [error]).start()
    return reference


def test_values_come_in_the_order_of_the_calls() -> None:
    slow: Reference = Future()
    threading.Timer(0.05, slow.set_result, ["slow"]).start()
    assert get_all([slow, value("fast")], TEN_SECONDS, "both") == ["slow", "fast"]
    assert get_all([], TEN_SECONDS, "nothing") == []


def test_failure_ends_the_wait_while_others_hang() -> None:
    """A collective's other members wait for the one that failed: waiting for them first would hang."""
    hanging: Reference = Future()
    with pytest.raises(WeightSyncError, match=r"^checksum mismatch in bucket 0$"):
        get_all([hanging, failure(WeightSyncError("checksum mismatch in bucket 0"))], None, "the publish")


def test_error_keeps_its_kind_and_so_its_exit_code() -> None:
    with pytest.raises(RewardError) as caught:
        get_all([failure(RewardError("sympy broke"))], TEN_SECONDS, "rollouts")
    assert caught.value.exit_code == 78


def test_other_errors_arrive_with_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        get_all([failure(ZeroDivisionError("division by zero"))], TEN_SECONDS, "training")
    assert isinstance(caught.value, RayTaskError)


def test_death_is_told_with_what_was_waited_for() -> None:
    with pytest.raises(LaunchError, match="A process died during the training step"):
        get_all([death()], TEN_SECONDS, "the training step")


def test_deadline_covers_all_calls_together() -> None:
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"\(weights.deadline_s\) for the publish; 2 did not answer"):
        get_all([value(1), Future(), Future()], Deadline(0.2, "weights.deadline_s"), "the publish")
    assert time.monotonic() - begun < 5.0


def test_first_error_is_the_callers_own() -> None:
    error = WeightSyncError("bucket 3")
    assert first_error([value(1), failure(error)], 10.0) is error


def test_first_error_waits_for_one_that_is_on_its_way() -> None:
    error = ActorDiedError()
    assert first_error([Future(), later(Future(), error, 0.05)], 10.0) is error


def test_no_error_where_all_succeed_or_hang() -> None:
    assert first_error([value(1)], 10.0) is None
    assert first_error([value(1), Future()], 0.1) is None
