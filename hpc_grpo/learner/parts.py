"""Optional parts of a learner: models beside the policy, and changes of the policy.

The critic is in `critic.py`. `Learner` creates the parts that its config needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.model import PolicyModel, gathered, parameter_specs, score
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.learner.setup import build_frozen
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.metrics.reductions import Reduction
from hpc_grpo.types import Minibatch, TrainSequence
from hpc_grpo.weights.store import bucket_layout

Minibatches = Sequence[Minibatch[TrainSequence]]


class LearnerPart:
    """A part of the learner. All ranks call it together. A method that a part does not override does nothing.

    A module that replaces a layer of the policy keeps the layer's parameter names. Its `merged_weight()` returns the
    weight to publish: engines do not know the added parameters.
    """

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        self.config, self.world_size, self.device = config, world_size, device
        self.ds_engines: list[Any] = []  # the part's engines: they save files like the policy's engine

    def change_policy(self, policy: PolicyModel) -> None:
        """Change the loaded policy before its optimizer is built. Only parameters with `requires_grad` are trained."""

    def before_step(self, minibatches: Minibatches) -> tuple[Minibatches, Mapping[str, Reduction]]:
        """Return the minibatches for the policy, with this part's advantages, and the part's metrics."""
        return minibatches, {}

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Return the part's fields of `LossInputs` for a microbatch, each `[C]` without gradient."""
        return {}

    def after_step(self, policy: PolicyModel, num_steps: int) -> None:
        """Read the policy after a step; `num_steps` counts the steps of the run until now."""

    def save(self, folder: Path, files: StagedFiles) -> None:
        """Save the part's state into a checkpoint through `files`."""

    def load(self, folder: Path, files: StagedFiles) -> None:
        """Restore what `save` saved."""

    def export(self, folder: Path) -> None:
        """Write, on rank 0, the part's files for users into the export's folder."""


class Teacher(LearnerPart):
    """The teacher of a distillation: scores the samples. It is loaded like the reference: sharded under ZeRO-3."""

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        super().__init__(config, world_size, device)
        self.model = build_frozen(config, world_size, device, "task.args.teacher")

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        return {"teacher_logprobs": score(self.model, replace(batch, experts=None))}


class Reference(LearnerPart):
    """The reference of the KL: the initial model, another model, or a model that follows the policy.

    It is frozen, or refreshed every `loss.kl.refresh_steps`. A piece is this rank's flat part of a parameter: the
    complete parameter under ZeRO-1 and 2, a shard with its padding under ZeRO-3.
    """

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        super().__init__(config, world_size, device)
        key = "model.path" if config.loss.kl.reference is None else "loss.kl.reference"
        self.model = build_frozen(config, world_size, device, key)
        self._parameters: dict[str, Any] = dict(self.model.hf_named_parameters())
        self._averages: dict[str, Tensor] = {}
        if config.loss.kl.averages and config.model.dtype != "float32":
            # An average in 16 bits would not move: each update is smaller than the rounding.
            self._averages = {name: self._piece(name).float() for name in self._parameters}

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        return {"ref_logprobs": score(self.model, replace(batch, experts=None))}

    def after_step(self, policy: PolicyModel, num_steps: int) -> None:
        """If a refresh is due, mix the policy's weights into the reference. A collective.

        reference = mixup * policy + (1 - mixup) * reference

        This is TRL's `sync_ref_model`. With mixup = 1, it gives GRPO's iterations (arXiv:2402.03300, algorithm 1).
        """
        every, mixup = self.config.loss.kl.refresh_steps, self.config.loss.kl.mixup
        if every is None or num_steps % every:
            return
        specs = parameter_specs(policy, self.config.model.dtype)
        for bucket in bucket_layout(specs).buckets:
            with gathered(policy, bucket.names) as weights:
                for name, weight in weights.items():
                    flat, held = weight.detach().reshape(-1), self._exact(name)
                    if self._is_sharded(name):
                        own = flat[dist.get_rank() * held.numel() :][: held.numel()]
                        flat = torch.cat([own, own.new_zeros(held.numel() - own.numel())])
                    held.copy_(flat) if mixup == 1.0 else held.lerp_(flat.to(held.dtype), mixup)
                    self._set(name, held)

    def save(self, folder: Path, files: StagedFiles) -> None:
        """Save this rank's share of a refreshed reference. A frozen reference is loaded from its path instead."""
        if self.config.loss.kl.refresh_steps is not None:
            shares = {name: self._share(name) for name in self._parameters}
            files.save(shares, folder / f"reference_rank_{dist.get_rank()}.pt")

    def load(self, folder: Path, files: StagedFiles) -> None:
        """Restore a refreshed reference that any number of learners saved. Raises ConfigError if it is missing."""
        if self.config.loss.kl.refresh_steps is None:
            return
        written = sorted(folder.glob("reference_rank_*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
        if not written:
            raise ConfigError(f"Checkpoint {folder} holds no reference, but loss.kl.refresh_steps needs one.")
        starts = dict.fromkeys(self._parameters, 0)
        for file in written:
            for name, share in files.load(str(file), map_location="cpu").items():
                # Offsets in the parameter: the saved share begins at `start`, this rank's piece at `own`.
                held, start = self._exact(name), starts[name]
                own = dist.get_rank() * held.numel() if self._is_sharded(name) else 0
                begin, end = max(start, own), min(start + len(share), own + held.numel())
                if begin < end:
                    held[begin - own : end - own] = share[begin - start : end - start].to(held.device)
                starts[name] += len(share)
        for name in self._parameters:
            self._set(name, self._exact(name))

    def _is_sharded(self, name: str) -> bool:
        return hasattr(self._parameters[name], "ds_tensor")

    def _piece(self, name: str) -> Tensor:
        """Return this rank's part of a parameter, as a view."""
        held = self._parameters[name].ds_tensor if self._is_sharded(name) else self._parameters[name]
        return held.detach().view(-1)

    def _exact(self, name: str) -> Tensor:
        """Return the piece in its highest precision: the float32 average if there is one."""
        return self._averages[name] if name in self._averages else self._piece(name)

    def _set(self, name: str, values: Tensor) -> None:
        """Copy `values` into the piece that the model computes with."""
        self._piece(name).copy_(values)
        if self._is_sharded(name) and self._parameters[name].numel():
            # ZeRO-3 keeps small parameters gathered. Drop the gathered copy, so that it is gathered again.
            self._parameters[name].partition()

    def _share(self, name: str) -> Tensor:
        """Return the part of a parameter that this rank saves: one shard of it, under any ZeRO stage."""
        held = self._exact(name)
        if self._is_sharded(name):
            return held
        size = -(-held.numel() // self.world_size)
        # A copy: for a view, torch would write the complete storage on each rank.
        return held[dist.get_rank() * size :][:size].to("cpu", copy=True)
