"""The critic of PPO: values the state before every trained token, and learns the returns.

Its model (`value_model.py`) is the policy's, loaded once more, or one that a run exported; its optimizer and its ZeRO
shards are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.config.resources import budget_of
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.optimizer_step import optimizer_step
from hpc_grpo.learner.packing import PackedBatch, pack_equalised
from hpc_grpo.learner.parts.base import LearnerPart
from hpc_grpo.learner.setup import deepspeed_config, sharded_loading
from hpc_grpo.learner.value_model import export_value_model, load_value_model
from hpc_grpo.metrics.reductions import Mean, Reduction
from hpc_grpo.registry import LEARNER_PARTS
from hpc_grpo.run.checkpoint import read_manifest
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.types import Minibatch, TrainSequence

if TYPE_CHECKING:
    from hpc_grpo.learner.staging import StagedFiles
    from hpc_grpo.types import Float32Array

_TAG = "critic"
"""DeepSpeed's folder of the critic in a checkpoint."""


@LEARNER_PARTS.register("critic")
class Critic(LearnerPart):
    """Trains the value model, and turns rewards into advantages; all ranks together."""

    @staticmethod
    def is_wanted(config: Config) -> bool:
        return config.needs.critic

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        super().__init__(config, world_size, device)
        self._engine = _build_engine(config, world_size, device)
        self.ds_engines.append(self._engine)

    def before_step(self, minibatches: Sequence[Minibatch]) -> tuple[Sequence[Minibatch], Mapping[str, Reduction]]:
        """Value all sequences, train on their returns, and return them with advantages."""
        shares = [minibatch.sequences for minibatch in minibatches]
        both = pack_equalised(shares, budget_of(self.config), self.device)
        ordered, packed = [each.sequences for each in both], [each.batches for each in both]
        values = [self._values(batches) for batches in packed]
        estimates = [self._estimates(*each) for each in zip(ordered, values, strict=True)]
        advantages = self._normalized([own for own, _ in estimates])
        metrics: dict[str, Mean] = {}
        for index, minibatch in enumerate(minibatches):
            returns = np.concatenate([np.zeros(0, np.float32), *estimates[index][1]])
            for name, value in self._train(packed[index], values[index], returns, minibatch.num_valid_tokens).items():
                metrics[name] = metrics[name].merged(value) if name in metrics else value
        trained = [
            replace(minibatch, sequences=tuple(map(_with_advantages, sequences, own)))
            for minibatch, sequences, own in zip(minibatches, ordered, advantages, strict=True)
        ]
        return trained, metrics

    def save(self, folder: Path, files: StagedFiles) -> Sequence[Path]:
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        return ()

    def load(self, folder: Path, files: StagedFiles) -> None:
        """Restore the critic. Raises ConfigError where another number of learners wrote it, or none did."""
        manifest = read_manifest(folder)
        if manifest is not None and manifest.world_size != self.world_size:
            raise ConfigError(
                f"Checkpoint {folder} holds a critic of {manifest.world_size} learners, and this run has "
                f"{self.world_size}. A critic needs as many as before: set launch.num_nodes and "
                f"placement.learners_per_node so."
            )
        loaded, _ = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if loaded is None:
            raise ConfigError(f"Checkpoint {folder} holds no critic: it is not of a run with task = ppo.")

    def export(self, folder: Path) -> None:
        """Write the value model into the folder `critic` of the export, where `task.critic` of another run finds it."""
        export_value_model(self._engine.module, self.config, folder / "critic")

    def _values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Value the state before each trained token, `[C]` a microbatch."""
        values = []
        for batch in batches:
            with torch.no_grad():
                values.append(self._engine.module(batch))
            PULSE.beat()
        return values

    def _estimates(
        self, sequences: Sequence[TrainSequence], values: Sequence[Tensor]
    ) -> tuple[list[Float32Array], list[Float32Array]]:
        """Return the advantages and the returns of each sequence, in packed order; what fills up comes last there."""
        ends = np.cumsum([sequence.num_trained_tokens for sequence in sequences], dtype=np.int64)
        own_values = np.split(torch.cat(list(values)).cpu().numpy(), ends)[:-1]
        advantages, returns = [], []
        for sequence, own in zip(sequences, own_values, strict=True):
            reward = float(sequence.advantages[sequence.loss_mask][-1])
            pair = generalized_advantages(reward, own, self.config.ppo.discount, self.config.ppo.gae_lambda)
            advantages.append(pair[0])
            returns.append(pair[1])
        return advantages, returns

    def _normalized(self, advantages: Sequence[Sequence[Float32Array]]) -> Sequence[Sequence[Float32Array]]:
        """Give all tokens of the step, over all ranks, mean 0 and deviation 1, where the config asks for it."""
        if not self.config.ppo.normalize_advantages:
            return advantages
        own = np.concatenate([each for of_one in advantages for each in of_one] or [np.zeros(0, np.float32)])
        own = own.astype(np.float64)
        sums = torch.tensor([own.size, own.sum(), (own**2).sum()], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(sums)
        count, total, squares = sums.tolist()
        mean = total / max(count, 1.0)
        deviation = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
        return [[((each - mean) / (deviation + 1e-8)).astype(np.float32) for each in of_one] for of_one in advantages]

    def _train(
        self, batches: Sequence[PackedBatch], values: Sequence[Tensor], returns: Float32Array, num_valid_tokens: int
    ) -> dict[str, Mean]:
        """Take one optimizer step on the returns of a minibatch; the metrics, means over its tokens, if it has any.

        Raises HpcGrpoError when the gradient is not finite.
        """
        sizes = [len(own) for own in values]
        padded = np.zeros(sum(sizes), np.float32)
        padded[: len(returns)] = returns
        targets = torch.from_numpy(padded).to(self.device).split(sizes)
        loss_sums: list[Tensor] = []

        def loss_sum(batch: PackedBatch, old: Tensor, target: Tensor) -> Tensor:
            losses = value_losses(self._engine(batch), old, target, self.config.ppo.value_clip)
            total = torch.dot(losses, batch.mask)
            loss_sums.append(total.detach())
            return total

        losses = [partial(loss_sum, *each) for each in zip(batches, values, targets, strict=True)]
        grad_norm = optimizer_step(self._engine, losses, num_valid_tokens, "critic", "task.critic_lr")
        if grad_norm is None:
            return {}
        old, target = (torch.cat(list(each))[: len(returns)] for each in (values, targets))
        sums = (torch.stack(loss_sums).sum(), old.sum(), target.sum(), ((target - old) ** 2).sum())
        names = ("critic/loss", "critic/value", "critic/return", "critic/squared_error")
        totals = zip(names, torch.stack(sums).tolist(), strict=True)
        return {name: Mean(total, len(returns)) for name, total in totals} | {"critic/grad_norm": Mean(grad_norm)}


def generalized_advantages(
    reward: float, values: Float32Array, discount: float, gae_lambda: float
) -> tuple[Float32Array, Float32Array]:
    """Return the advantages and the returns of an episode, each `[C]`; the reward comes with its last token.

    A_t = d_t + discount * gae_lambda * A_(t+1)    d_t = r_t + discount * V_(t+1) - V_t    return_t = A_t + V_t

    Generalised advantage estimation (Schulman et al., arXiv:1506.02438). `values` `[C]` are of the states before each
    token; the state after the last is worth 0.
    """
    advantages = np.zeros_like(values)
    following, next_value = 0.0, 0.0
    for index in range(len(values) - 1, -1, -1):
        own_reward = reward if index == len(values) - 1 else 0.0
        difference = own_reward + discount * next_value - float(values[index])
        following = difference + discount * gae_lambda * following
        advantages[index], next_value = following, float(values[index])
    return advantages, advantages + values


def value_losses(predicted: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error per token `[C]`, the larger of that and of the value clipped around the old one.

    The clip is PPO's as in its authors' code (openai/baselines, ppo2); None: no clip.
    """
    errors = (predicted - returns) ** 2
    if clip is not None:
        clipped = old + (predicted - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    return 0.5 * errors


def _build_engine(config: Config, world_size: int, device: Any) -> Any:
    """Load the value model and build its DeepSpeed engine."""
    import deepspeed

    settings = deepspeed_config(config, world_size)
    with sharded_loading(settings):
        model = load_value_model(config, device)
    train = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.ppo.critic_lr, betas=train.betas, eps=train.eps, weight_decay=0.0, fused=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine


def _with_advantages(sequence: TrainSequence, advantages: Float32Array) -> TrainSequence:
    whole = np.zeros(len(sequence.token_ids), dtype=np.float32)
    whole[sequence.loss_mask] = advantages
    return replace(sequence, advantages=whole)
