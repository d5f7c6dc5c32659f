"""The learner: turns sequences with advantages into optimizer steps.

Runs in    the learner's process, one per rank. Training is a collective: all ranks must be called.
Takes      this rank's `Minibatch`es of a step; produces typed metrics, and new weights.
Waits for  the other ranks, in every microbatch under ZeRO-2 and ZeRO-3. A dead rank fails them after a timeout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpc_grpo.algorithms.objective import TokenWeights
from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.algorithms.terms import LossInputs, LossOutput, interpolated_proximal, kl_k3
from hpc_grpo.config import Config
from hpc_grpo.config.resources import budget_of, check_sequence_parallel
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.critic import Critic
from hpc_grpo.learner.group import init_process_group, of_all_ranks
from hpc_grpo.learner.lora import BaseReference, Lora
from hpc_grpo.learner.model import PolicyModel, check_packing, parameter_specs, score
from hpc_grpo.learner.packing import PackedBatch, pack, pack_equalised
from hpc_grpo.learner.parts import LearnerPart, Reference, Teacher
from hpc_grpo.learner.setup import build_engine, optimizer_step, prepare_libraries, resolve_device
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.metrics.reductions import EffectiveSampleSize, Max, Mean, Reduction
from hpc_grpo.types import Minibatch, ParameterSpec, TrainSequence

if TYPE_CHECKING:
    from hpc_grpo.types import Float32Array

PARTS: dict[type[LearnerPart], Callable[[Config], bool]] = {
    Critic: lambda config: config.needs.critic,
    Lora: lambda config: config.lora is not None,
    BaseReference: lambda config: config.reference_is_base,
    Reference: lambda config: config.needs.reference and not config.reference_is_base,
    Teacher: lambda config: config.needs.teacher,
}
"""The class of a part -> whether a run has this part. A step calls the parts in this order."""


class Learner:
    """One rank of the learners' group. Independent of Ray: the caller passes the store in which ranks meet.

    The learners of a sequence-parallel group receive the same minibatches, and return the same metrics.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
        total_optimizer_steps: int | None = None,
    ) -> None:
        """Join the group, load the model and build the engine. A single rank needs no `store` of torch.distributed.

        `total_optimizer_steps` is for the linear and cosine schedules. Default: from train.total_steps.
        """
        check_sequence_parallel(config, world_size)
        self.rank, self.world_size, self.device = rank, world_size, resolve_device(config)
        if self.device.type == "cpu":
            torch.set_num_threads(config.train.num_threads or 1)
        init_process_group(rank, world_size, self.device, store)
        random.seed(config.run.seed + rank)
        np.random.seed((config.run.seed + rank) % 2**32)
        torch.manual_seed(config.run.seed + rank)
        prepare_libraries()
        self.parts = [kind(config, world_size, self.device) for kind, is_wanted in PARTS.items() if is_wanted(config)]

        changes = [part.change_policy for part in self.parts]
        self.ds_engine = build_engine(config, world_size, self.device, total_optimizer_steps, changes)
        check_packing(self.model, f"model.path = {config.model.path}", self.device)
        self.microbatches = 0, 0
        """The step's number of trained microbatches, and of all microbatches; 0 and 0 between steps."""
        self.files = StagedFiles(config.placement.learners_per_node)
        for ds_engine in (self.ds_engine, *(own for part in self.parts for own in part.ds_engines)):
            ds_engine.checkpoint_engine = self.files
        self.train_by(config)

    def train_by(self, config: Config) -> None:
        """From now on, train with the loss and the normalisation of `config`. Model and engine do not change."""
        self.config = config
        self._objective = algorithm_of(config).objective()
        is_of_advantages_alone = all(type(part).loss_inputs is LearnerPart.loss_inputs for part in self.parts)
        is_of_advantages_alone &= not config.train.router_aux_loss_coef
        self.skips_zero_advantages = self._objective.is_still_without_advantage and is_of_advantages_alone

    @property
    def model(self) -> PolicyModel:
        return self.ds_engine.module  # type: ignore[no-any-return]

    @property
    def policy_version(self) -> int:
        """Return the number of optimizer steps, over all attempts of the run."""
        return int(self.ds_engine.global_steps)

    def train_step(
        self, minibatches: Sequence[Minibatch[TrainSequence]], measured: Sequence[TrainSequence] | None = None
    ) -> dict[str, Reduction]:
        """Take one optimizer step per minibatch. Return this rank's metrics; the caller merges them over ranks.

        `measured` is this rank's share of the sequences for the mismatch metrics; None on all ranks: no such metrics.
        If no rank has a trained token, a minibatch counts as a step and leaves the weights unchanged. Raises
        HpcGrpoError if a gradient is not finite, and the ConfigError of `check_sequences`.
        """
        metrics: dict[str, Reduction] = {}
        budget, accumulator, first_version = budget_of(self.config), MetricAccumulator(), self.policy_version
        if measured is not None:
            ((batches, _),) = pack_equalised([measured], budget, self.device)
            metrics.update(mismatch(self.model, batches))
        for part in self.parts:
            minibatches, of_part = part.before_step(minibatches)
            metrics.update(of_part)
        shares = [minibatch.sequences for minibatch in minibatches]
        sequences = [own for share in shares for own in share]
        settings = self.model.language_model.config.get_text_config()
        check_sequences(sequences, settings, self._objective.proximal, self.config)
        if self.skips_zero_advantages:
            # Sequences without advantage have no gradient. They still count in the divisor: the result does not change.
            skipped = [own for own in sequences if not own.advantages.any()]
            num_skipped = sum(own.num_trained_tokens for own in skipped)
            accumulator.left_out = num_skipped if self._objective.denominator == "tokens" else len(skipped)
            metrics["tokens/left_out_fraction"] = Mean(num_skipped, sum(own.num_trained_tokens for own in sequences))
            shares = [tuple(own for own in share if own.advantages.any()) for share in shares]
        packed = [batches for batches, _ in pack_equalised(shares, budget, self.device)]
        self.microbatches = 0, sum(map(len, packed))
        learning_rates, grad_norms = [], []
        for minibatch, batches, proximal in zip(minibatches, packed, self._proximal_logprobs(packed), strict=True):
            learning_rates.append(self.ds_engine.get_lr()[0])
            of_minibatch = self._prepared(batches, proximal)
            loss_sum = partial(self._loss_sum, accumulator, first_version, of_minibatch)
            losses = [partial(loss_sum, *each) for each in zip(batches, proximal, strict=True)]
            divisor = self._objective.divisor(minibatch)
            grad_norms.append(optimizer_step(self.ds_engine, losses, divisor, "policy", "train.lr"))
        self.microbatches = 0, 0
        for part in self.parts:
            part.after_step(self.model, self.policy_version // self.config.train.num_minibatches)
        taken = [norm for norm in grad_norms if norm is not None]
        steps = {
            "grad_norm": Mean(sum(taken), len(taken)),
            "lr": Mean(sum(learning_rates), len(minibatches)),
            "skipped_optimizer_steps": Mean(len(minibatches) - len(taken)),
        }
        return {**accumulator.reductions(), **steps, **metrics}

    def parameter_specs(self) -> list[ParameterSpec]:
        """List the parameters of a publish: all, or the adapter's."""
        return parameter_specs(self.model, self.config.model.dtype, of_adapter=self.config.publishes_adapter)

    def _proximal_logprobs(self, packed: Sequence[Sequence[PackedBatch]]) -> list[list[Tensor | None]]:
        """Return the proximal logprobs of each microbatch; None where the training pass computes them.

        These are the learner's logprobs at the start of the step. With `loss.proximal: engine` they are the engine's.
        """
        if self._objective.proximal == "engine":
            return [[batch.engine_logprobs for batch in batches] for batches in packed]
        known: list[list[Tensor | None]] = []
        for index, batches in enumerate(packed):
            # The first minibatch runs with the weights from the start of the step: its logprobs are the proximal ones.
            comes_later = index == 0 or self._objective.proximal == "interpolated"
            is_computed = not comes_later or bool(self._objective.preparations)
            known.append([score(self.model, batch) if is_computed else None for batch in batches])
        return known

    def _prepared(self, batches: Sequence[PackedBatch], proximal: Sequence[Tensor | None]) -> dict[str, Any]:
        """Call `prepare` of loss and correction on all ranks' tokens of an optimizer step; return the results by name.

        A collective. One learner of each sequence-parallel group counts, because the group has the same tokens.
        """
        preparations = self._objective.preparations
        if not preparations:
            return {}
        columns = [
            torch.stack([anchor, batch.engine_logprobs, batch.advantages, batch.draws, batch.mask])
            for batch, anchor in zip(batches, proximal, strict=True)
            if anchor is not None
        ]
        rows = of_all_ranks(torch.cat(columns, dim=1), every=self.config.train.sequence_parallel)
        is_trained = rows[-1] > 0.0
        # A step whose microbatches all have mask 0.0 still runs its passes.
        anchors, engine, advantages, draws, _ = rows[:, is_trained] if is_trained.any() else torch.zeros_like(rows)
        one_sequence = torch.zeros_like(anchors, dtype=torch.int64)
        inputs = LossInputs(anchors, anchors, engine, None, advantages, one_sequence, draws=draws)
        return {name: prepare(inputs) for name, prepare in preparations.items()}

    def _loss_sum(
        self,
        accumulator: MetricAccumulator,
        first_version: int,
        of_minibatch: Mapping[str, Any],
        batch: PackedBatch,
        proximal: Tensor | None,
    ) -> Tensor:
        """Sum the weighted token losses of a microbatch, with gradient. The step began at version `first_version`."""
        of_parts: dict[str, Any] = {"ref_logprobs": None}
        for part in self.parts:
            of_parts.update(part.loss_inputs(batch))
        balances = self.config.train.router_aux_loss_coef > 0.0
        learner_logprobs, entropy, *balance = self.ds_engine(batch, with_balance=balances)
        inputs = LossInputs(
            learner_logprobs=learner_logprobs,
            proximal_logprobs=learner_logprobs.detach() if proximal is None else proximal,
            engine_logprobs=batch.engine_logprobs,
            advantages=batch.advantages,
            sequence_ids=batch.sequence_ids,
            entropy=entropy,
            draws=batch.draws,
            of_minibatch=of_minibatch,
            **of_parts,
        )
        version = self.policy_version
        if proximal is None and version > first_version:
            estimated = interpolated_proximal(inputs, batch.policy_versions, first_version, version)
            inputs = replace(inputs, proximal_logprobs=estimated)
        output = self._objective.loss(inputs)
        weights = self._objective.token_weights(self.config.rollout.max_new_tokens, batch.sequence_ids, batch.mask)
        output = replace(output, means=output.means | {"policy/entropy": entropy.detach()})
        if balance:
            term = self.config.train.router_aux_loss_coef * balance[0]
            terms = output.terms | {"loss/router_aux": term.detach()}
            output = replace(output, per_token=output.per_token + term, terms=terms)
        accumulator.add(batch.mask, output, weights)
        self.microbatches = self.microbatches[0] + 1, self.microbatches[1]
        return torch.dot(output.per_token, weights.of_tokens)


def score_apart(
    model: PolicyModel,
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    device: Any,
    images: tuple[bytes, ...] = (),
) -> list[Float32Array]:
    """Return the logprobs `[C]` of each completion of `prompt`, each from its own pass. A collective under ZeRO-3.

    The same weights then give the same numbers, independent of other completions.
    """
    logprobs = []
    for completion in completions:
        token_ids = np.array([*prompt, *completion], dtype=np.int32)
        zeros = np.zeros(len(token_ids), dtype=np.float32)
        is_completion = np.arange(len(token_ids)) >= len(prompt)
        batch = pack([TrainSequence(0, 0, token_ids, is_completion, zeros, zeros, images=images)])
        logprobs.append(score(model, batch.to(device)).cpu().numpy())
    return logprobs


def check_sequences(sequences: Sequence[TrainSequence], model_settings: Any, proximal: str, config: Config) -> None:
    """Raise ConfigError for a sequence beyond the model's context, or without the versions or experts of each token."""
    context = getattr(model_settings, "max_position_embeddings", None)
    longest = max((len(sequence.token_ids) for sequence in sequences), default=0)
    if context is not None and longest > context:
        raise ConfigError(
            f"A sequence has {longest} tokens, but model.path = {config.model.path} has a context of "
            f"{context}. Shorten the data's prompts and completions, or use another model."
        )
    if proximal == "interpolated" and any(each.policy_versions is None for each in sequences):
        raise ConfigError(
            f"loss.proximal = interpolated needs the policy version of each token, and sequences of task = "
            f"{config.task.name} have none. Fill TrainSequence.policy_versions [L] where the task's class overrides "
            f"`sequences`, or set loss.proximal=recomputed."
        )
    if config.train.router_replay and any(each.experts is None for each in sequences):
        raise ConfigError(
            f"train.router_replay = true needs the engine's experts of each token, and sequences of task = "
            f"{config.task.name} have none. Fill TrainSequence.experts [L, layers, k] where the task's class overrides "
            f"`sequences`, or set train.router_replay=false."
        )


class MetricAccumulator:
    """Sums per-token metrics on the device and reads them once: a read in every microbatch would stall a GPU."""

    def __init__(self) -> None:
        self.left_out = 0
        """Tokens or sequences that count in the loss's divisor but were not computed. Their terms are 0."""
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, mask: Tensor, output: LossOutput, weights: TokenWeights) -> None:
        """Add a microbatch's per-token values, each `[C]`, where `mask` `[C]` is 1.0."""
        own = {("count", "tokens"): mask.sum(), ("count", "loss"): weights.units}
        own |= {("mean", name): torch.dot(values, mask) for name, values in output.means.items()}
        own |= {("term", name): torch.dot(values, weights.of_tokens) for name, values in output.terms.items()}
        own |= {("weight", name): torch.dot(values, mask) for name, values in output.weights.items()}
        own |= {("square", name): torch.dot(values.square(), mask) for name, values in output.weights.items()}
        self._sums |= {key: self._sums[key] + total if key in self._sums else total for key, total in own.items()}
        for name, values in output.maxima.items():
            largest = (values * mask).max()
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def reductions(self) -> dict[str, Reduction]:
        """Return means over the computed tokens, and the loss's terms divided like the loss.

        A rank without a token returns no means: its zeros would enter the mean over ranks.
        """
        if not self._sums:
            return {}
        values = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        sums = dict(zip(self._sums, values, strict=False))
        tokens, divisor_share = sums["count", "tokens"], sums["count", "loss"] + self.left_out
        reduced: dict[str, Reduction] = {}
        for (kind, name), total in sums.items():
            if kind == "term":
                reduced[name] = Mean(total, divisor_share)
            elif kind == "mean" and tokens:
                reduced[name] = Mean(total, tokens)
            elif kind == "weight" and tokens:
                reduced[name] = EffectiveSampleSize(total, sums["square", name], tokens)
        maxima = zip(self._maxima, values[len(sums) :], strict=True)
        return reduced | {name: Max(value) for name, value in maxima if tokens}


def mismatch(model: PolicyModel, batches: Sequence[PackedBatch]) -> dict[str, Reduction]:
    """Compare the logprobs of engine and learner. A rank without tokens returns no metrics. A collective under ZeRO-3.

    `mismatch/kl` estimates KL(engine || learner) from the tokens of `batches`, which the engine sampled.
    """
    is_sampled = torch.cat([batch.mask for batch in batches]) > 0.0
    learner = torch.cat([score(model, batch) for batch in batches])[is_sampled]
    engine = torch.cat([batch.engine_logprobs for batch in batches])[is_sampled]
    if not len(learner):
        return {}
    difference = (learner - engine).abs()
    return {
        "mismatch/logprob_abs_diff_mean": Mean(float(difference.sum()), len(learner)),
        "mismatch/logprob_abs_diff_max": Max(float(difference.max())),
        "mismatch/kl": Mean(float(kl_k3(engine, learner).sum()), len(learner)),
    }
