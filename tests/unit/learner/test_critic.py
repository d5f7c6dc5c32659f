from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.learner import critic as critic_module
from hpc_grpo.learner.critic import Critic, generalized_advantages, token_rewards, value_losses
from hpc_grpo.learner.packing import zero_weight_batch
from hpc_grpo.run.checkpoint import Manifest, write_manifest
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.types import TrainSequence
from tests.support.configs import minimal_config


def test_gae_of_several_turns_equals_a_loop_over_all_tokens_that_steps_over_observations() -> None:
    """The loop is in float64 and has NaN where a critic's value of an observation would stand."""
    random, largest = np.random.default_rng(7), 0.0
    for _ in range(100):
        lengths = random.integers(1, 6, size=(random.integers(1, 5), 2))
        mask = np.repeat([False, True] * len(lengths), lengths.ravel())
        of_turns = random.normal(size=len(lengths)).astype(np.float32)
        worth = np.where(mask, np.repeat(of_turns, lengths.sum(axis=1)), np.float32(0.0))
        values = np.where(mask, random.normal(size=len(mask)), np.nan).astype(np.float32)
        zeros = np.zeros(len(mask), np.float32)
        sequence = TrainSequence(0, 0, np.zeros(len(mask), np.int32), mask, worth, zeros)
        discount, gae_lambda = random.random(2)
        found, returns = generalized_advantages(token_rewards(sequence), values[mask], discount, gae_lambda)
        ends = dict(zip((np.cumsum(lengths.sum(axis=1)) - 1).tolist(), of_turns.astype(np.float64), strict=True))
        expected, following, next_value = [], 0.0, 0.0
        for t in range(len(mask) - 1, -1, -1):
            if mask[t]:
                difference = ends.get(t, 0.0) + discount * next_value - np.float64(values[t])
                following = difference + discount * gae_lambda * following
                expected.append((following, following + np.float64(values[t])))
                next_value = np.float64(values[t])
        largest = max(largest, float(np.abs(np.array([found, returns]) - np.array(expected[::-1]).T).max()))
    print(f"| GAE over turns | largest difference {largest:.1e} |")
    assert largest < 1e-5


def test_a_critic_of_another_number_of_learners_is_refused_with_what_to_do(tmp_path: Path) -> None:
    critic: Any = Critic.__new__(Critic)
    critic.world_size = 1
    write_manifest(tmp_path, Manifest(1, 2, 1, ()))
    with pytest.raises(ConfigError, match=r"a critic of 2 learners.*placement\.learners_per_node.*replay` has one"):
        critic.load(tmp_path, None)


VERL = "verl-project/verl tests/trainer/ppo/test_reinforce_pp_multiturn_on_cpu.py"
NEMO = "NVIDIA-NeMo/RL tests/unit/algorithms/test_ppo.py"


@pytest.mark.parametrize(
    ("source", "mask", "reward", "values", "discount", "gae_lambda", "expected"),
    [
        (VERL, [1, 1, 0, 0, 1, 1], 1.0, [0.0] * 4, 1.0, 1.0, [1.0] * 4),
        (VERL, [1, 1, 0, 0, 1], 2.0, [0.0] * 3, 0.5, 1.0, [0.5, 1.0, 2.0]),
        (VERL, [1, 0, 1, 1], 1.0, [0.0] * 3, 1.0, 1.0, [1.0] * 3),
        (VERL, [1, 1, 1, 1, 1], 3.0, [0.0] * 5, 1.0, 1.0, [3.0] * 5),
        (NEMO, [1, 1, 1, 1], 1.0, [0.5] * 4, 1.0, 1.0, [0.5] * 4),
        (NEMO, [1, 1, 1], 5.0, [1.0, 2.0, 3.0], 1.0, 0.0, [1.0, 1.0, 2.0]),
        (NEMO, [1, 1, 0, 1, 1], 1.0, [0.1, 0.2, 0.4, 0.5], 0.99, 0.95, [0.7823244, 0.7276176, 0.56525, 0.5]),
    ],
)
def test_peers_numbers(
    source: str, mask: list[int], reward: float, values: Any, discount: float, gae_lambda: float, expected: list[float]
) -> None:
    """An observation neither ends what a reward reaches nor counts as a step. Without values, GAE is the return.

    The last case is worked out by hand: the peer's test compares it with the same tokens without the observation.
    """
    own = np.array([False, *mask], dtype=bool)  # after a prompt
    worth = np.zeros(len(own), np.float32)
    worth[-1] = reward
    sequence = TrainSequence(0, 0, np.zeros(len(own), np.int32), own, worth, np.zeros(len(own), np.float32))
    found, _ = generalized_advantages(token_rewards(sequence), np.array(values, np.float32), discount, gae_lambda)
    difference = float(np.abs(found - np.array(expected)).max())
    print(f"| {source} | {' '.join(f'{own:.6g}' for own in found)} | {difference:.1e} |")
    assert difference < 1e-6


def test_a_clipped_value_loses_what_the_worse_of_both_loses() -> None:
    predicted, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.zeros(3), torch.tensor([2.0, 0.0, 0.0])
    assert value_losses(predicted, old, returns, None).tolist() == pytest.approx([0.5, 0.5, 0.005])
    assert value_losses(predicted, old, returns, 0.2).tolist() == pytest.approx([0.5 * 1.8**2, 0.5, 0.005])


class FakeEngine:
    """Values every state with its only parameter, and does not train."""

    def __init__(self, grad_norm: float) -> None:
        self.grad_norm, self.value = grad_norm, torch.zeros(1, requires_grad=True)
        self.module, self.dp_world_size, self.global_steps, self.skipped_steps = self, 1, 7, 0
        self.lr_scheduler, self.device = None, torch.device("cpu")

    def __call__(self, batch: Any, *, with_entropy: bool = True) -> tuple[torch.Tensor, None]:
        return self.value.expand(len(batch.mask)), None

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None: ...

    def step(self) -> None: ...

    def get_global_grad_norm(self) -> float:
        return self.grad_norm


@pytest.fixture
def critic_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeEngine], Critic]:
    def make(engine: FakeEngine) -> Critic:
        monkeypatch.setattr(critic_module, "build_value_engine", lambda *_: engine)
        return Critic(minimal_config(), 1, torch.device("cpu"))

    return make


def test_each_microbatch_of_the_critic_is_a_sign_of_progress(critic_with: Any) -> None:
    critic, batches = critic_with(FakeEngine(0.5)), [zero_weight_batch()] * 3
    before = PULSE._beat.count
    values = critic.values(batches)
    assert PULSE._beat.count == before + 3
    critic.train(batches, values, np.zeros(0, np.float32), num_valid_tokens=1)
    assert PULSE._beat.count == before + 6


def test_a_critic_with_nothing_to_train_on_counts_the_step_and_measures_nothing(critic_with: Any) -> None:
    engine = FakeEngine(0.5)
    critic, batches = critic_with(engine), [zero_weight_batch()]
    assert critic.train(batches, critic.values(batches), np.zeros(0, np.float32), num_valid_tokens=0) == {}
    assert (engine.global_steps, engine.skipped_steps) == (8, 1)


def test_a_critic_without_a_finite_gradient_ends_the_run_before_it_is_saved(critic_with: Any) -> None:
    critic, batches = critic_with(FakeEngine(float("nan"))), [zero_weight_batch()]
    with pytest.raises(
        HpcGrpoError,
        match=r"critic in optimizer step 7 is not finite \(nan\)\. "
        r"Give a new run\.name and a lower task\.args\.critic_lr",
    ):
        critic.train(batches, critic.values(batches), np.zeros(0, np.float32), num_valid_tokens=1)
