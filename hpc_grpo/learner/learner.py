"""The learner: turns sequences with advantages into optimizer steps.

Runs in    the learner's process, one per rank; under ZeRO every rank must be called.
Consumes   this rank's `Minibatch`es of a step; produces its typed metrics, and new weights (`gathered`).
Waits for  the other ranks, in every microbatch under ZeRO-2 and ZeRO-3; a dead one fails them after a timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpc_grpo.algorithms.base import algorithm_of
from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.objective import TokenWeights, divisor, token_weights
from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.group import init_process_group
from hpc_grpo.learner.model import PolicyModel, gathered, parameter_specs
from hpc_grpo.learner.optimizer_step import optimizer_step
from hpc_grpo.learner.packing import PackedBatch, pack_equalised
from hpc_grpo.learner.parts.base import wanted_parts
from hpc_grpo.learner.setup import build_engine, build_reference, resolve_device, seed_everything
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.metrics.reductions import EffectiveSampleSize, Max, Mean, Reduction
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.types import Minibatch, ParameterSpec, TrainSequence

if TYPE_CHECKING:
    from hpc_grpo.types import Float32Array


class Learner:
    """One rank of the data-parallel group. Knows nothing of Ray: whoever starts the processes brings the store."""

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
        total_optimizer_steps: int | None = None,
    ) -> None:
        """Join the group, load the model and build the engine.

        `store` is where the ranks meet, any store of torch.distributed; not needed for one rank.
        `total_optimizer_steps` shapes the linear and cosine schedules; by default train.total_steps decides.
        """
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = resolve_device(config)
        if self.device.type == "cpu":
            torch.set_num_threads(config.train.num_threads or 1)
        init_process_group(rank, world_size, self.device, store)
        seed_everything(config.run.seed + rank)
        self.parts = wanted_parts(config, world_size, self.device)
        self.ds_engine = build_engine(config, world_size, self.device, total_optimizer_steps, self.parts)
        self.reference = build_reference(config, world_size, self.device)
        self.files = StagedFiles(config.placement.learners_per_node)
        for ds_engine in (self.ds_engine, *(own for part in self.parts for own in part.ds_engines)):
            ds_engine.checkpoint_engine = self.files
        self._loss = algorithm_of(config).find_loss()

    @property
    def model(self) -> PolicyModel:
        return self.ds_engine.module  # type: ignore[no-any-return]

    @property
    def policy_version(self) -> int:
        """Count the optimizer steps taken, over all attempts of the run."""
        return int(self.ds_engine.global_steps)

    def train_step(self, minibatches: Sequence[Minibatch]) -> dict[str, Reduction]:
        """Take one optimizer step for each minibatch; returns this rank's metrics, to be merged over ranks.

        Raises HpcGrpoError when a gradient is not finite: DeepSpeed then drops that update, and the steps no longer
        mean what they count. Raises ConfigError for a sequence longer than the model's context.
        """
        of_parts: dict[str, Reduction] = {}
        for part in self.parts:
            minibatches, metrics = part.before_step(minibatches)
            of_parts.update(metrics)
        shares = [minibatch.sequences for minibatch in minibatches]
        self._check_context(shares)
        packed = pack_equalised(shares, self.config.train.max_tokens_per_microbatch, self.device)
        # The first minibatch meets the weights the step started with: its own logprobs are the proximal ones.
        proximal: list[list[Tensor | None]] = [[None] * len(packed[0])]
        proximal += [[self._logprobs(self.model, batch) for batch in batches] for batches in packed[1:]]
        accumulator = MetricAccumulator()
        learning_rates, grad_norms = [], []
        for minibatch, batches, anchors in zip(minibatches, packed, proximal, strict=True):
            learning_rates.append(self.ds_engine.get_lr()[0])
            grad_norms.append(self._optimizer_step(minibatch, batches, anchors, accumulator))
        num_steps = len(minibatches)
        steps = {"grad_norm": Mean(sum(grad_norms), num_steps), "lr": Mean(sum(learning_rates), num_steps)}
        return {**accumulator.reductions(), **steps, **of_parts}

    def score(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Float32Array]:
        """Return the logprobs `[C]` that the policy gives each completion of `prompt`; under ZeRO-3 on every rank."""
        sequences = [_scored(prompt, completion, index) for index, completion in enumerate(completions)]
        (batches,) = pack_equalised([sequences], self.config.train.max_tokens_per_microbatch, self.device)
        flat = torch.cat([self._logprobs(self.model, batch) for batch in batches]).cpu().numpy()
        return np.split(flat, np.cumsum([len(completion) for completion in completions]))[: len(completions)]

    def parameter_specs(self) -> list[ParameterSpec]:
        return parameter_specs(self.model, self.config.model.dtype)

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Give full live parameters by name inside the `with` block; under ZeRO-3 every rank must enter."""
        return gathered(self.model, names)

    def _check_context(self, shares: Sequence[Sequence[TrainSequence]]) -> None:
        context = getattr(self.model.language_model.config, "max_position_embeddings", None)
        longest = max((len(sequence.token_ids) for share in shares for sequence in share), default=0)
        if context is not None and longest > context:
            raise ConfigError(
                f"A sequence has {longest} tokens, but model.path = {self.config.model.path} has a context of "
                f"{context}. Shorten the data's prompts and completions, or take another model."
            )

    def _optimizer_step(
        self,
        minibatch: Minibatch,
        batches: Sequence[PackedBatch],
        proximal: Sequence[Tensor | None],
        accumulator: MetricAccumulator,
    ) -> float:
        losses = [
            partial(self._loss_sum, batch, anchor, accumulator) for batch, anchor in zip(batches, proximal, strict=True)
        ]
        return optimizer_step(self.ds_engine, losses, divisor(self.config.loss, minibatch), "policy", "train.lr")

    def _loss_sum(self, batch: PackedBatch, proximal: Tensor | None, accumulator: MetricAccumulator) -> Tensor:
        """Sum the weighted token losses of a microbatch, with gradient."""
        reference = None if self.reference is None else self._logprobs(self.reference, batch)
        learner_logprobs, entropy = self.ds_engine(batch)
        anchor = learner_logprobs.detach() if proximal is None else proximal
        inputs = LossInputs(
            learner_logprobs, anchor, batch.engine_logprobs, reference, batch.advantages, batch.sequence_ids
        )
        output = self._loss(inputs, self.config.loss)
        weights = token_weights(self.config.loss, self.config.rollout.max_new_tokens, batch.sequence_ids, batch.mask)
        accumulator.add(batch.mask, replace(output, means=output.means | {"policy/entropy": entropy}), weights)
        return torch.dot(output.per_token, weights.of_tokens)

    @staticmethod
    def _logprobs(model: PolicyModel, batch: PackedBatch) -> Tensor:
        with torch.no_grad():
            logprobs, _ = model(batch)
        PULSE.beat()
        return logprobs


def _scored(prompt: Sequence[int], completion: Sequence[int], index: int) -> TrainSequence:
    token_ids = np.array([*prompt, *completion], dtype=np.int32)
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return TrainSequence(0, index, token_ids, np.arange(len(token_ids)) >= len(prompt), zeros, zeros)


class MetricAccumulator:
    """Sums per-token metrics on the device and reads them once: reading one in every microbatch would stall a GPU."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, mask: Tensor, output: LossOutput, weights: TokenWeights) -> None:
        """Add a microbatch's per-token quantities, each `[C]`, where `mask` `[C]` is 1.0."""
        self._add("count", "tokens", mask.sum())
        self._add("count", "loss", weights.units)
        for name, values in output.means.items():
            self._add("mean", name, torch.dot(values, mask))
        for name, values in output.terms.items():
            self._add("term", name, torch.dot(values, weights.of_tokens))
        for name, values in output.weights.items():
            self._add("weight", name, torch.dot(values, mask))
            self._add("square", name, torch.dot(values.square(), mask))
        for name, values in output.maxima.items():
            largest = (values * mask).max()
            self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def _add(self, kind: str, name: str, total: Tensor) -> None:
        key = (kind, name)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def reductions(self) -> dict[str, Reduction]:
        if not self._sums:
            return {}
        values = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        sums = dict(zip(self._sums, values, strict=False))
        tokens, divisor_share = sums["count", "tokens"], sums["count", "loss"]
        reduced: dict[str, Reduction] = {}
        for (kind, name), total in sums.items():
            if kind in ("mean", "term"):
                reduced[name] = Mean(total, tokens if kind == "mean" else divisor_share)
            elif kind == "weight":
                reduced[name] = EffectiveSampleSize(total, sums["square", name], tokens)
        maxima = zip(self._maxima, values[len(sums) :], strict=True)
        return reduced | {name: Max(value) for name, value in maxima}
