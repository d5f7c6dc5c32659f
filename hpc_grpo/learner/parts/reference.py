"""The reference of the KL: the model that training began with, another model, or one that follows the policy.

Its pieces are what this rank holds of each parameter, flat: the whole of it under ZeRO-1 and 2, a shard under ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.model import PolicyModel, gathered, parameter_specs, score
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.learner.parts.base import LearnerPart
from hpc_grpo.learner.setup import build_frozen
from hpc_grpo.registry import LEARNER_PARTS
from hpc_grpo.weights.buckets import bucket_layout

if TYPE_CHECKING:
    from hpc_grpo.learner.staging import StagedFiles

_BUCKET_BYTES = 256 << 20
"""Bytes of the policy's parameters gathered at once under ZeRO-3."""


@LEARNER_PARTS.register("reference")
class Reference(LearnerPart):
    """Scores the tokens of each microbatch; refreshed every `loss.kl.refresh_steps`, or frozen."""

    @staticmethod
    def is_wanted(config: Config) -> bool:
        return config.needs.reference

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        super().__init__(config, world_size, device)
        key = "model.path" if config.loss.kl.reference is None else "loss.kl.reference"
        self.model = build_frozen(config, world_size, device, config.models[key], key)
        self._parameters = dict(self.model.hf_named_parameters())
        self._averages: dict[str, Tensor] = {}
        if config.loss.kl.averages and config.model.dtype != "float32":
            # An average in 16 bits would stand still: a step of it is less than what rounding takes.
            self._averages = {name: _piece(p).float() for name, p in self._parameters.items()}

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        return {"ref_logprobs": score(self.model, batch)}

    def after_step(self, policy: PolicyModel, num_steps: int) -> None:
        """Take the policy's weights, or move a share of the way to them, where a refresh is due. A collective.

        reference = mixup * policy + (1 - mixup) * reference

        TRL's `sync_ref_model`, and with mixup = 1 the iterations of GRPO (arXiv:2402.03300, algorithm 1).
        """
        every = self.config.loss.kl.refresh_steps
        if every is None or num_steps % every:
            return
        specs = parameter_specs(policy, self.config.model.dtype)
        for bucket in bucket_layout(specs, _BUCKET_BYTES).buckets:
            with gathered(policy, bucket.names) as weights:
                for name, weight in weights.items():
                    self._mix(name, weight)

    def save(self, folder: Path, files: StagedFiles) -> Sequence[Path]:
        """Save this rank's share of a reference that is refreshed; a frozen one is the model that the run names."""
        if self.config.loss.kl.refresh_steps is not None:
            shares = {name: self._share(name) for name in self._parameters}
            files.save(shares, _file(folder, dist.get_rank()))
        return ()

    def load(self, folder: Path, files: StagedFiles) -> None:
        """Restore a reference that is refreshed, whatever number of learners wrote it. Raises ConfigError without."""
        if self.config.loss.kl.refresh_steps is None:
            return
        written = sorted(folder.glob(_file(folder, "*").name), key=lambda file: int(file.stem.rpartition("_")[2]))
        if not written:
            raise ConfigError(f"Checkpoint {folder} holds no reference, which loss.kl.refresh_steps refreshes.")
        starts = dict.fromkeys(self._parameters, 0)
        for file in written:
            for name, share in files.load(str(file), map_location="cpu").items():
                self._fill(name, share, starts[name])
                starts[name] += len(share)
        for name in self._averages:
            self._set(name, self._averages[name])

    def _mix(self, name: str, weight: Tensor) -> None:
        """Move the reference's parameter `name` towards the policy's whole `weight`."""
        policy = _like_piece(weight, self._parameters[name])
        held, share = self._held(name), self.config.loss.kl.mixup
        held.copy_(policy) if share == 1.0 else held.lerp_(policy.to(held.dtype), share)
        self._set(name, held)

    def _held(self, name: str) -> Tensor:
        """Return the piece that counts: the average in float32 where there is one."""
        return self._averages[name] if name in self._averages else _piece(self._parameters[name])

    def _set(self, name: str, values: Tensor) -> None:
        """Make `values` the piece that the model computes with."""
        parameter = self._parameters[name]
        _piece(parameter).copy_(values)
        if hasattr(parameter, "ds_tensor") and parameter.numel():
            # ZeRO-3 keeps small parameters gathered: it gathers this one anew.
            parameter.partition()

    def _share(self, name: str) -> Tensor:
        """Return what this rank saves of a parameter: its shard, under any stage."""
        held = self._held(name)
        if hasattr(self._parameters[name], "ds_tensor"):
            return held
        size = -(-held.numel() // self.world_size)
        # A copy: of a view torch would write the whole storage, on each rank.
        return held[dist.get_rank() * size :][:size].to("cpu", copy=True)

    def _fill(self, name: str, share: Tensor, start: int) -> None:
        """Copy what this rank holds of a share that begins at `start` of the whole parameter."""
        held = self._held(name)
        own = dist.get_rank() * held.numel() if hasattr(self._parameters[name], "ds_tensor") else 0
        begin, end = max(start, own), min(start + len(share), own + held.numel())
        if begin < end:
            held[begin - own : end - own] = share[begin - start : end - start].to(held.device)
        self._set(name, held)


def _file(folder: Path, rank: int | str) -> Path:
    return folder / f"reference_rank_{rank}.pt"


def _piece(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter, flat, with ZeRO-3's padding; a view."""
    held: Tensor = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
    return held.detach().view(-1)


def _like_piece(weight: Tensor, parameter: Any) -> Tensor:
    """Cut from a whole `weight` what `_piece` is of the parameter."""
    flat, piece = weight.detach().reshape(-1), _piece(parameter)
    if not hasattr(parameter, "ds_tensor"):
        return flat
    own = flat[dist.get_rank() * piece.numel() :][: piece.numel()]
    return torch.cat([own, own.new_zeros(piece.numel() - own.numel())])
