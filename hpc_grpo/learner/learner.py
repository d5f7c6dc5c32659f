"""The learner: turns sequences with advantages into optimizer steps.

Runs in    the learner's process, one per rank; under ZeRO every rank must be called.
Consumes   this rank's `Minibatch`es of a step; produces its typed metrics, and new weights (`gathered`).
Waits for  the other ranks, in every microbatch under ZeRO-2 and ZeRO-3; a dead one fails them after a timeout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.algorithms.terms import LossInputs, interpolated_proximal
from hpc_grpo.config import Config
from hpc_grpo.config.resources import budget_of
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.accumulator import MetricAccumulator
from hpc_grpo.learner.group import init_process_group
from hpc_grpo.learner.loading import check_packing
from hpc_grpo.learner.minibatch import prepared, without_still
from hpc_grpo.learner.mismatch import mismatch
from hpc_grpo.learner.model import PolicyModel, gathered, parameter_specs, score
from hpc_grpo.learner.optimizer_step import optimizer_step
from hpc_grpo.learner.packing import PackedBatch, pack, pack_equalised
from hpc_grpo.learner.parts.base import wanted_parts
from hpc_grpo.learner.setup import build_engine, resolve_device, seed_everything
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.metrics.reductions import Mean, Reduction
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
        check_packing(self.model, f"model.path = {config.model.path}", self.device)
        self.files = StagedFiles(config.placement.learners_per_node)
        for ds_engine in (self.ds_engine, *(own for part in self.parts for own in part.ds_engines)):
            ds_engine.checkpoint_engine = self.files
        self.train_by(config)

    def train_by(self, config: Config) -> None:
        """Take the loss of `config` from now on, and how it cuts sums; what was built stays as it is."""
        self.config = config
        self._objective = algorithm_of(config).objective()
        adds_nothing = not any(part.is_in_loss for part in self.parts)
        self.leaves_out_still = self._objective.is_still_without_advantage and adds_nothing

    @property
    def model(self) -> PolicyModel:
        return self.ds_engine.module  # type: ignore[no-any-return]

    @property
    def policy_version(self) -> int:
        """Count the optimizer steps taken, over all attempts of the run."""
        return int(self.ds_engine.global_steps)

    def train_step(
        self, minibatches: Sequence[Minibatch], measured: Sequence[TrainSequence] | None = None
    ) -> dict[str, Reduction]:
        """Take one optimizer step for each minibatch; returns this rank's metrics, to be merged over ranks.

        `measured` are this rank's share of the sequences that tell the mismatch; None on all ranks: nothing does.
        A minibatch without a token to train on, on any rank, counts as a step and leaves the weights as they are.

        Raises HpcGrpoError when a gradient is not finite: DeepSpeed then drops that update, and the steps no longer
        mean what they count. Raises ConfigError for a sequence longer than the model's context, or without the versions
        that are to be interpolated.
        """
        of_parts: dict[str, Reduction] = {}
        if measured is not None:
            (of_rank,) = pack_equalised([measured], budget_of(self.config), self.device)
            of_parts.update(mismatch(self.model, of_rank.batches))
        for part in self.parts:
            minibatches, metrics = part.before_step(minibatches)
            of_parts.update(metrics)
        shares = [minibatch.sequences for minibatch in minibatches]
        self._check_sequences(shares)
        accumulator = MetricAccumulator()
        if self.leaves_out_still:
            shares, left_out = without_still(shares, self._objective, accumulator)
            of_parts.update(left_out)
        packed = [each.batches for each in pack_equalised(shares, budget_of(self.config), self.device)]
        proximal, proximal_version = self._proximal_logprobs(packed), self.policy_version
        learning_rates, grad_norms = [], []
        for minibatch, batches, anchors in zip(minibatches, packed, proximal, strict=True):
            learning_rates.append(self.ds_engine.get_lr()[0])
            of_minibatch = prepared(self._objective.preparations, batches, anchors)
            context = _StepContext(accumulator, proximal_version, of_minibatch)
            grad_norms.append(self._optimizer_step(minibatch, batches, anchors, context))
        for part in self.parts:
            part.after_step(self.model, self.policy_version // self.config.train.num_minibatches)
        taken = [norm for norm in grad_norms if norm is not None]
        steps = {
            "grad_norm": Mean(sum(taken), len(taken)),
            "lr": Mean(sum(learning_rates), len(minibatches)),
            "skipped_optimizer_steps": Mean(len(minibatches) - len(taken)),
        }
        return {**accumulator.reductions(), **steps, **of_parts}

    def score(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Float32Array]:
        """Return the logprobs `[C]` that the policy gives each completion of `prompt`; under ZeRO-3 on every rank.

        Each in a pass of its own: the same weights give the same numbers, whatever else is scored.
        """
        packed = [pack([_scored(prompt, completion)]).to(self.device) for completion in completions]
        return [score(self.model, batch).cpu().numpy() for batch in packed]

    def parameter_specs(self) -> list[ParameterSpec]:
        return parameter_specs(self.model, self.config.model.dtype)

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Give full live parameters by name inside the `with` block; under ZeRO-3 every rank must enter."""
        return gathered(self.model, names)

    def _check_sequences(self, shares: Sequence[Sequence[TrainSequence]]) -> None:
        context = getattr(self.model.language_model.config, "max_position_embeddings", None)
        sequences = [sequence for share in shares for sequence in share]
        longest = max((len(sequence.token_ids) for sequence in sequences), default=0)
        if context is not None and longest > context:
            raise ConfigError(
                f"A sequence has {longest} tokens, but model.path = {self.config.model.path} has a context of "
                f"{context}. Shorten the data's prompts and completions, or take another model."
            )
        if self._objective.proximal == "interpolated" and any(each.policy_versions is None for each in sequences):
            raise ConfigError(
                f"loss.proximal = interpolated needs the version that sampled each token, and sequences of task = "
                f"{self.config.task.name} have none. Fill TrainSequence.policy_versions [L] where its class overrides "
                f"`sequences`, or set loss.proximal=recomputed."
            )

    def _optimizer_step(
        self,
        minibatch: Minibatch,
        batches: Sequence[PackedBatch],
        proximal: Sequence[Tensor | None],
        context: _StepContext,
    ) -> float | None:
        losses = [
            partial(self._loss_sum, batch, anchor, context) for batch, anchor in zip(batches, proximal, strict=True)
        ]
        return optimizer_step(self.ds_engine, losses, self._objective.divisor(minibatch), "policy", "train.lr")

    def _proximal_logprobs(self, packed: Sequence[Sequence[PackedBatch]]) -> list[list[Tensor | None]]:
        """Compute the learner's logprobs at the start of a step; None where the step's own passes will tell them."""
        if self._objective.proximal == "engine":
            return [[batch.engine_logprobs for batch in batches] for batches in packed]
        known: list[list[Tensor | None]] = []
        for batches in packed:
            # The first minibatch meets the weights the step started with: its own logprobs are the proximal ones.
            is_told = not known or self._objective.proximal == "interpolated"
            if is_told and not self._objective.preparations:
                known.append([None] * len(batches))
            else:
                known.append([score(self.model, batch) for batch in batches])
        return known

    def _loss_sum(self, batch: PackedBatch, proximal: Tensor | None, context: _StepContext) -> Tensor:
        """Sum the weighted token losses of a microbatch, with gradient."""
        of_parts: dict[str, Tensor] = {}
        for part in self.parts:
            of_parts.update(part.loss_inputs(batch))
        learner_logprobs, entropy = self.ds_engine(batch)
        anchor = learner_logprobs.detach() if proximal is None else proximal
        inputs = LossInputs(
            learner_logprobs,
            anchor,
            batch.engine_logprobs,
            None,
            batch.advantages,
            batch.sequence_ids,
            entropy=entropy,
            draws=batch.draws,
            of_minibatch=context.of_minibatch,
        )
        inputs = replace(inputs, **of_parts)
        version = self.policy_version
        if proximal is None and version > context.proximal_version:
            anchor = interpolated_proximal(inputs, batch.policy_versions, context.proximal_version, version)
            inputs = replace(inputs, proximal_logprobs=anchor)
        output = self._objective.loss(inputs)
        weights = self._objective.token_weights(self.config.rollout.max_new_tokens, batch.sequence_ids, batch.mask)
        output = replace(output, means=output.means | {"policy/entropy": entropy.detach()})
        context.accumulator.add(batch.mask, output, weights)
        return torch.dot(output.per_token, weights.of_tokens)


def _scored(prompt: Sequence[int], completion: Sequence[int]) -> TrainSequence:
    token_ids = np.array([*prompt, *completion], dtype=np.int32)
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return TrainSequence(0, 0, token_ids, np.arange(len(token_ids)) >= len(prompt), zeros, zeros)


@dataclass(frozen=True)
class _StepContext:
    """Holds what the microbatches of an optimizer step share; `of_minibatch` is that of `LossInputs`."""

    accumulator: MetricAccumulator
    proximal_version: int
    of_minibatch: Mapping[str, Any]
