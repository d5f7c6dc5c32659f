"""The teacher of a distillation: a second frozen model, which scores what the policy's engines sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.learner.model import score
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.learner.parts.base import LearnerPart
from hpc_grpo.learner.setup import build_frozen
from hpc_grpo.registry import LEARNER_PARTS


@LEARNER_PARTS.register("teacher")
class Teacher(LearnerPart):
    """Loaded as the reference is: in the precision of model.dtype, sharded under ZeRO-3."""

    @staticmethod
    def is_wanted(config: Config) -> bool:
        return config.needs.teacher

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        super().__init__(config, world_size, device)
        self.model = build_frozen(config, world_size, device, config.distill.required_teacher, "task.teacher")

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        return {"teacher_logprobs": score(self.model, batch)}
