"""Waiting on Ray, with futures in the place of its references."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from hpc_grpo.driver.remote import ActorLostError, Deadline, errors_in_time, get_all
from hpc_grpo.errors import LaunchError, RewardError, WeightSyncError
from tests.support.ray_futures import FakeRay, Reference, answered

pytestmark = pytest.mark.usefixtures("fake_ray")
TEN_SECONDS = Deadline(10.0, "deadlines.silent_s")


def later(reference: Reference, error: Exception, delay_s: float) -> Reference:
    threading.Timer(delay_s, reference.set_exception, [error]).start()
    return reference


def test_values_come_in_the_order_of_the_calls() -> None:
    slow: Reference = Future()
    threading.Timer(0.05, slow.set_result, ["slow"]).start()
    assert get_all([slow, answered("fast")], TEN_SECONDS, "both") == ["slow", "fast"]
    assert get_all([], TEN_SECONDS, "nothing") == []


def test_all_calls_that_have_ended_are_taken_in_one_wait(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait looks at every reference: one for each of a step's groups would be the square of their number."""
    wait, waits = fake_ray.wait, []
    monkeypatch.setattr(fake_ray, "wait", lambda *args, **options: waits.append(1) or wait(*args, **options))
    assert get_all([answered(number) for number in range(100)], None, "rollouts") == [*range(100)]
    assert len(waits) == 2


def test_a_failure_ends_the_wait_while_others_hang() -> None:
    """A collective's other members wait for the one that failed: waiting for them first would hang."""
    hanging: Reference = Future()
    with pytest.raises(WeightSyncError, match=r"^checksum mismatch in bucket 0$"):
        get_all([hanging, answered(WeightSyncError("checksum mismatch in bucket 0"))], None, "the publish")


def test_an_error_of_an_actor_keeps_its_kind_and_so_its_exit_code() -> None:
    with pytest.raises(RewardError) as caught:
        get_all([answered(RewardError("sympy broke"))], TEN_SECONDS, "rollouts")
    assert caught.value.exit_code == 78


def test_other_errors_arrive_with_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        get_all([answered(ZeroDivisionError("division by zero"))], TEN_SECONDS, "training")
    assert isinstance(caught.value, RayTaskError)


def test_the_death_of_an_actor_is_an_error_that_says_what_was_waited_for() -> None:
    with pytest.raises(LaunchError, match="A process died during the training step"):
        get_all([answered(ActorDiedError())], TEN_SECONDS, "the training step")


def test_an_actor_that_ray_killed_for_memory_has_died_and_its_account_of_the_node_is_left_out() -> None:
    error = OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.\nTop 10 memory users: ...")
    with pytest.raises(
        ActorLostError, match=r"was killed during training to free memory: 1 worker\(s\) were killed .* memory\.$"
    ):
        get_all([answered(error)], TEN_SECONDS, "training")


def test_one_deadline_covers_all_calls_together() -> None:
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"\(deadlines.silent_s\) for the publish; 2 did not answer"):
        get_all([answered(1), Future(), Future()], Deadline(0.2, "deadlines.silent_s"), "the publish")
    assert time.monotonic() - begun < 5.0


def test_errors_come_by_their_calls_as_they_were_raised() -> None:
    error = WeightSyncError("bucket 3")
    good, bad = answered(1), answered(error)
    assert errors_in_time([good, bad], 10.0) == {bad: error}


def test_an_error_on_its_way_is_waited_for_and_a_hanging_call_has_none() -> None:
    error = ActorDiedError()
    late = later(Future(), error, 0.05)
    assert errors_in_time([Future(), late], 1.0) == {late: error}
