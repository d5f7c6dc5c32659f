from __future__ import annotations

import numpy as np
import pytest

from hpc_grpo.driver.weights import Canary
from hpc_grpo.errors import WeightSyncError
from hpc_grpo.types import Completion, Prompt
from tests.support.configs import minimal_config

PROMPT = Prompt(0, 0, tuple(range(100)), "", {})


def said(*logprobs: float, version: int = 1, token: int = 7) -> Completion:
    tokens = np.full(len(logprobs), token, dtype=np.int32)
    own = np.array(logprobs, dtype=np.float32)
    return Completion(tokens, own, np.full(len(logprobs), version, dtype=np.int32), "length")


def scored(*logprobs: float) -> np.ndarray:
    return np.array(logprobs, dtype=np.float32)


@pytest.fixture
def canary() -> Canary:
    return Canary(minimal_config(model={"dtype": "float32"}), PROMPT)


def test_the_probe_is_the_end_of_a_prompt_and_comes_before_all_that_wait(canary: Canary) -> None:
    assert canary.request.prompt_token_ids == tuple(range(36, 100))
    assert canary.request.is_urgent


def test_an_engine_near_the_learner_is_sound_and_its_distance_told(canary: Canary) -> None:
    assert canary.judge("a", said(-1.0, -2.0), scored(-1.01, -2.03), 1) == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize("own", [(-1.0, -2.2), (-1.0, float("nan"))])
def test_an_engine_far_from_the_learner_is_told_with_both_numbers(canary: Canary, own: tuple[float, ...]) -> None:
    with pytest.raises(WeightSyncError, match=r"more than 0.05 .*learner -1.0000 -2.0000"):
        canary.judge("a", said(*own), scored(-1.0, -2.0), 1)


def test_an_engine_of_less_precision_may_be_as_far_as_rounding_takes_it() -> None:
    canary = Canary(minimal_config(model={"dtype": "float32"}, engine={"dtype": "bfloat16"}), PROMPT)
    assert canary.judge("a", said(-1.0, -2.2), scored(-1.0, -2.0), 1) == pytest.approx(0.1, rel=1e-4)


def test_an_engine_that_repeats_itself_while_the_learner_moved_keeps_old_weights(canary: Canary) -> None:
    canary.judge("a", said(-1.0, -2.0), scored(-1.0, -2.0), 1)
    with pytest.raises(WeightSyncError, match=r"keeps old weights after the publish of version 2.*moved by 0.001 nats"):
        canary.judge("a", said(-1.0, -2.0, version=2), scored(-1.001, -2.0), 2)


def test_moves_too_small_to_be_seen_add_up(canary: Canary) -> None:
    canary.judge("a", said(-1.0), scored(-1.0), 1)
    canary.judge("a", said(-1.0, version=2), scored(-1.00006), 2)
    with pytest.raises(WeightSyncError, match="keeps old weights after the publish of version 3"):
        canary.judge("a", said(-1.0, version=3), scored(-1.00012), 3)


@pytest.mark.parametrize(
    ("engine", "completion"),
    [
        pytest.param("a", said(-1.0, -2.00001, version=2), id="it moved too"),
        pytest.param("a", said(-1.0, -2.0, version=2, token=8), id="it says something else"),
        pytest.param("b", said(-1.0, -2.0, version=2), id="it is another engine"),
    ],
)
def test_an_engine_may_be_near_the_learner_that_moved(canary: Canary, engine: str, completion: Completion) -> None:
    canary.judge("a", said(-1.0, -2.0), scored(-1.0, -2.0), 1)
    canary.judge(engine, completion, scored(-1.001, -2.0), 2)


@pytest.mark.parametrize(("noise", "is_sound"), [(0.0, False), (1e-4, True)])
def test_an_engine_may_be_further_away_by_what_it_was_off_at_first(
    canary: Canary, noise: float, is_sound: bool
) -> None:
    """One that holds a part of the weights is not near the learner any more, and far below the bound of all engines."""
    canary.judge("a", said(-1.0 + noise), scored(-1.0), 1)
    if is_sound:
        canary.judge("a", said(-1.5, version=2), scored(-1.505), 2)
    else:
        with pytest.raises(WeightSyncError, match=r"it is 0.005 nats a token from the learner, more than 0.002"):
            canary.judge("a", said(-1.5, version=2), scored(-1.505), 2)


def test_a_completion_of_other_weights_is_an_error(canary: Canary) -> None:
    with pytest.raises(WeightSyncError, match="holds weight version 1 after the publish of version 2"):
        canary.judge("a", said(-1.0, version=1), scored(-1.0), 2)


def test_in_bfloat16_the_bound_is_wider() -> None:
    wide = Canary(minimal_config(model={"dtype": "bfloat16"}), PROMPT)
    assert wide.judge("a", said(-1.0), scored(-1.9), 1) == pytest.approx(0.9, rel=1e-4)
