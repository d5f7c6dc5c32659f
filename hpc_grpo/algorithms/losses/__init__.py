"""Policy losses: one file per variant, behind one signature, found by name."""

from __future__ import annotations

from hpc_grpo.algorithms.losses import grpo, sft
from hpc_grpo.algorithms.losses.interface import LossInputs, LossOutput, PolicyLoss
from hpc_grpo.config import LossConfig
from hpc_grpo.errors import ConfigError

LOSSES: dict[str, PolicyLoss] = {"grpo": grpo.loss, "sft": sft.loss}


def find_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; raises ConfigError with the known names."""
    if name not in LOSSES:
        raise ConfigError(f"loss.name = {name!r} is not registered. Choose one of: {', '.join(sorted(LOSSES))}.")
    return LOSSES[name]


__all__ = ["LOSSES", "LossConfig", "LossInputs", "LossOutput", "PolicyLoss", "find_loss"]
