"""The critic of PPO: values the state before every trained token, and learns the returns.

The critic is the trunk of a causal language model with a head of one number. It has its own optimizer and ZeRO shards.
Its export is a token classifier with one label: the logit at a token is the value of the state after this token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_grpo.config import Config
from hpc_grpo.config.resources import budget_of
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.checkpoint import copy_settings, full_weights, settings_of_config
from hpc_grpo.learner.model import gathered_parameters, parameter_specs, score
from hpc_grpo.learner.packing import PackedBatch, pack_equalised
from hpc_grpo.learner.parts import LearnerPart, Minibatches
from hpc_grpo.learner.setup import deepspeed_config, fit_buckets, load_trained, optimizer_step, sharded_loading
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.metrics.reductions import Mean, Reduction
from hpc_grpo.run.checkpoint import read_manifest
from hpc_grpo.system.hugging_face import find_model
from hpc_grpo.system.say import say
from hpc_grpo.types import TrainSequence

if TYPE_CHECKING:
    from hpc_grpo.types import Float32Array

_TAG = "critic"  # DeepSpeed's folder of the critic in a checkpoint


class Critic(LearnerPart):
    """Trains the value model, and computes advantages from rewards. All ranks call it together."""

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        super().__init__(config, world_size, device)
        self._engine = build_value_engine(config, world_size, device)
        self.ds_engines.append(self._engine)

    def before_step(self, minibatches: Minibatches) -> tuple[Minibatches, Mapping[str, Reduction]]:
        """Value all sequences, train on their returns, and return the sequences with advantages.

        The sequences arrive with rewards in `advantages`.
        """
        packed = pack_equalised([each.sequences for each in minibatches], budget_of(self.config), self.device)
        # Replayed experts are the policy's. The critic's routers choose their own.
        packed = [([replace(batch, experts=None) for batch in batches], own) for batches, own in packed]
        values = [self.values(batches) for batches, _ in packed]
        estimates = [self._estimates(sequences, own) for (_, sequences), own in zip(packed, values, strict=True)]
        advantages = self._normalized([[pair[0] for pair in pairs] for pairs in estimates])
        metrics: dict[str, Mean] = {}
        trained = []
        for index, (minibatch, (batches, sequences)) in enumerate(zip(minibatches, packed, strict=True)):
            returns = np.concatenate([np.zeros(0, np.float32), *(pair[1] for pair in estimates[index])])
            own_metrics = self.train(batches, values[index], returns, minibatch.num_valid_tokens)
            metrics |= {name: own.merged(metrics.get(name, Mean(0.0, 0.0))) for name, own in own_metrics.items()}
            with_advantages = []
            for sequence, own in zip(sequences, advantages[index], strict=True):
                of_tokens = np.zeros(len(sequence.token_ids), dtype=np.float32)
                of_tokens[sequence.loss_mask] = own
                with_advantages.append(replace(sequence, advantages=of_tokens))
            trained.append(replace(minibatch, sequences=tuple(with_advantages)))
        return trained, metrics

    def save(self, folder: Path, files: StagedFiles) -> None:
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path, files: StagedFiles) -> None:
        """Restore the critic. Raises ConfigError if the checkpoint lacks it, or another number of learners wrote it."""
        manifest = read_manifest(folder)
        if manifest is not None and manifest.world_size != self.world_size:
            raise ConfigError(
                f"Checkpoint {folder} holds a critic of {manifest.world_size} learners. There are "
                f"{self.world_size} now, and the numbers must be equal: change launch.num_nodes and "
                f"placement.learners_per_node. "
                f"`hpc-grpo model replay` has one learner, and cannot train steps of such a run again."
            )
        with settings_of_config(self._engine):
            found, _ = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if found is None:
            raise ConfigError(f"Checkpoint {folder} holds no critic: it is not from a run with task = ppo.")

    def export(self, folder: Path) -> None:
        """Write the value model with a float32 head into `folder / "critic"`, for `task.args.critic`. A collective.

        If transformers has no token classifier of the architecture, prints a message and writes nothing.
        """
        from transformers import AutoModelForTokenClassification

        model, dtype = self._engine.module, self.config.model.dtype
        language_model = model.language_model
        trunk = f"{language_model.base_model_prefix}."
        specs = [spec for spec in parameter_specs(model, dtype) if spec.name.startswith(trunk)]
        weights = full_weights(model, specs)
        parameter = language_model.get_output_embeddings().weight
        with gathered_parameters([parameter]):
            head = parameter.detach().float().cpu().clone()
        if dist.get_rank() != 0:
            return
        settings = copy.deepcopy(language_model.config)
        if type(settings) not in AutoModelForTokenClassification._model_mapping:
            say(f"The critic is not exported: transformers has no token classifier of {type(language_model).__name__}.")
            return
        settings.num_labels, settings.classifier_dropout = 1, 0.0
        with torch.device("meta"):
            written = AutoModelForTokenClassification.from_config(settings, dtype=getattr(torch, dtype))
        for name, own in written.named_parameters():
            if not name.startswith(trunk):
                weights[name] = head.reshape(own.shape) if own.dim() == 2 else torch.zeros(own.shape)
        written.save_pretrained(folder / "critic", state_dict=weights)
        copy_settings(self.config, folder / "critic")

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the value of the state before each trained token, `[C]` per microbatch."""
        return [score(self._engine.module, batch) for batch in batches]

    def _estimates(
        self, sequences: Sequence[TrainSequence], values: Sequence[Tensor]
    ) -> list[tuple[Float32Array, Float32Array]]:
        """Return advantages and returns of each sequence, in packed order. Fillers come last and are left out."""
        ends = np.cumsum([sequence.num_trained_tokens for sequence in sequences], dtype=np.int64)
        own_values = np.split(torch.cat(list(values)).cpu().numpy(), ends)[:-1]
        estimate = partial(
            generalized_advantages, discount=self.config.task_args.discount, gae_lambda=self.config.task_args.gae_lambda
        )
        return list(map(estimate, map(token_rewards, sequences), own_values))

    def _normalized(self, advantages: Sequence[Sequence[Float32Array]]) -> list[list[Float32Array]]:
        """Normalise the advantages of the step's tokens, over all ranks, to mean 0 and standard deviation 1."""
        own = np.concatenate([each for of_one in advantages for each in of_one] or [np.zeros(0, np.float32)])
        own = own.astype(np.float64)
        sums = torch.tensor([own.size, own.sum(), (own**2).sum()], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(sums)
        count, total, squares = sums.tolist()
        mean = total / max(count, 1.0)
        deviation = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
        return [[((each - mean) / (deviation + 1e-8)).astype(np.float32) for each in of_one] for of_one in advantages]

    def train(
        self, batches: Sequence[PackedBatch], values: Sequence[Tensor], returns: Float32Array, num_valid_tokens: int
    ) -> dict[str, Mean]:
        """Take one optimizer step on the returns of a minibatch. Return metrics: means over this rank's tokens.

        Returns {} if no rank has a trained token. Raises HpcGrpoError if the gradient is not finite.
        """
        sizes = [len(own) for own in values]
        padded = np.zeros(sum(sizes), np.float32)
        padded[: len(returns)] = returns
        targets = torch.from_numpy(padded).to(self.device).split(sizes)
        loss_sums: list[Tensor] = []

        def loss_sum(batch: PackedBatch, old: Tensor, target: Tensor) -> Tensor:
            predicted, _ = self._engine(batch)
            losses = value_losses(predicted, old, target, self.config.task_args.value_clip)
            total = torch.dot(losses, batch.mask)
            loss_sums.append(total.detach())
            return total

        losses = [partial(loss_sum, *each) for each in zip(batches, values, targets, strict=True)]
        grad_norm = optimizer_step(self._engine, losses, num_valid_tokens, "critic", "task.args.critic_lr")
        if grad_norm is None:
            return {}
        old, target = (torch.cat(list(each))[: len(returns)] for each in (values, targets))
        sums = (torch.stack(loss_sums).sum(), old.sum(), target.sum(), ((target - old) ** 2).sum())
        names = ("critic/loss", "critic/value", "critic/return", "critic/squared_error")
        totals = zip(names, torch.stack(sums).tolist(), strict=True)
        return {name: Mean(total, len(returns)) for name, total in totals} | {"critic/grad_norm": Mean(grad_norm)}


def token_rewards(sequence: TrainSequence) -> Float32Array:
    """Return the reward of each trained token `[C]`: a turn's reward is at its last token.

    A turn ends where the next token is not trained (an observation), or where the sequence ends.
    """
    ends_turn = np.append(~sequence.loss_mask[1:], True)
    return np.where(ends_turn, sequence.advantages, np.float32(0.0))[sequence.loss_mask]


def generalized_advantages(
    rewards: Float32Array, values: Float32Array, discount: float, gae_lambda: float
) -> tuple[Float32Array, Float32Array]:
    """Return the advantages and the returns of a sequence, each `[C]` like `rewards` and `values`.

    A_t = d_t + discount * gae_lambda * A_(t+1)    d_t = r_t + discount * V_(t+1) - V_t    return_t = A_t + V_t

    Generalised advantage estimation (Schulman et al., arXiv:1506.02438) over the trained tokens. t + 1 is the next
    trained token: observations are skipped, as in verl and NeMo-RL. `values` are those of the states before the
    tokens; the state after the last token has value 0.
    """
    advantages = np.zeros_like(values)
    following, next_value = 0.0, 0.0
    for index in range(len(values) - 1, -1, -1):
        difference = float(rewards[index]) + discount * next_value - float(values[index])
        following = difference + discount * gae_lambda * following
        advantages[index], next_value = following, float(values[index])
    return advantages, advantages + values


def value_losses(predicted: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error per token `[C]`: the larger error of the value and of the clipped value.

    The value is clipped to `old` ± `clip`, as in PPO's original code (openai/baselines, ppo2). None: no clipping.
    """
    errors = (predicted - returns) ** 2
    if clip is not None:
        clipped = old + (predicted - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    return 0.5 * errors


class ValueHead(nn.Module):  # type: ignore[misc]
    """Replaces the model's output layer: one float32 value per state, 0.0 before training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, None]:
        """Return the values `[C]` of `hidden` `[C, D]`, like `LogprobHead`. Ignores the next token and temperature."""
        return hidden.float() @ self.weight.float(), None


def build_value_engine(config: Config, world_size: int, device: Any) -> Any:
    """Build the DeepSpeed engine of `model.path` with a head of zeros, or of the critic at `task.args.critic`.

    Raises ConfigError if `task.args.critic` holds no critic.
    """
    import deepspeed

    settings, path = deepspeed_config(config, world_size), config.task_args.critic
    with sharded_loading(settings):
        model = load_trained(config, device, path, "model.path" if path is None else "task.args.critic")
        language_model = model.language_model
        head = ValueHead(language_model.config.get_text_config().hidden_size)
        if path is not None:
            head.weight.data.copy_(_read_head(path, language_model.base_model_prefix, len(head.weight)))
        language_model.set_output_embeddings(head)
    fit_buckets(settings, model.parameters())
    groups = [{"params": model.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.task_args.critic_lr, **config.train.adamw, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine


def _read_head(path: str, prefix: str, hidden_size: int) -> Tensor:
    """Read the head `[D]` of a token classifier with one label and no bias. Raises ConfigError if there is none."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(find_model(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if not name.startswith(f"{prefix}.")]  # noqa: SIM118 - no dict
            found |= {name: tensors.get_tensor(name).float() for name in names}
    weights = [each for each in found.values() if tuple(each.shape) == (1, hidden_size)]
    if len(weights) != 1 or any(each.any() for each in found.values() if each.dim() == 1):
        raise ConfigError(
            f"task.args.critic = {path} holds no value head (one row of {hidden_size} numbers, no bias), only "
            f"{', '.join(sorted(found)) or 'a trunk'}. Give the critic folder of an export, or null."
        )
    return weights[0][0]
