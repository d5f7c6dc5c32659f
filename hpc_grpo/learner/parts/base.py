"""The interface of a part of a learner, such as a critic beside the policy or LoRA inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.config import Config
from hpc_grpo.metrics.reductions import Reduction
from hpc_grpo.registry import LEARNER_PARTS
from hpc_grpo.types import Minibatch

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_grpo.learner.model import PolicyModel
    from hpc_grpo.learner.packing import PackedBatch
    from hpc_grpo.learner.staging import StagedFiles


class LearnerPart:
    """One on each rank, and every rank calls it. What a part does not override does nothing.

    A module of the policy that a part puts in the place of a layer names the layer's parameters as that did, and gives
    in `merged_weight()` what is published of its own: the added parameters stay with the learner.
    """

    def __init__(self, config: Config, world_size: int, device: Any) -> None:
        self.config = config
        self.world_size = world_size
        self.device = device
        self.ds_engines: list[Any] = []
        """DeepSpeed's engines of the part, which write their files as the policy's does."""

    @staticmethod
    def is_wanted(config: Config) -> bool:
        """Tell whether a run of `config` has this part."""
        raise NotImplementedError

    def change_policy(self, language_model: Any) -> None:
        """Change the loaded policy before its optimizer is built, which gets what then requires a gradient."""

    def before_step(self, minibatches: Sequence[Minibatch]) -> tuple[Sequence[Minibatch], Mapping[str, Reduction]]:
        """Return what the policy is to be trained on, with advantages of the part's making, and the part's metrics."""
        return minibatches, {}

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Return the fields of `LossInputs` that the part knows of a microbatch, each `[C]` without gradient."""
        return {}

    @property
    def is_in_loss(self) -> bool:
        """Tell whether the loss of a token depends on this part."""
        return type(self).loss_inputs is not LearnerPart.loss_inputs

    def after_step(self, policy: PolicyModel, num_steps: int) -> None:
        """Take note of the policy that a step has trained; `num_steps` counts those of the run."""

    def save(self, folder: Path, files: StagedFiles) -> Sequence[Path]:
        """Save the part's state into a checkpoint, by `files`; return what this rank wrote in other ways."""
        return ()

    def load(self, folder: Path, files: StagedFiles) -> None:
        """Restore what `save` saved."""

    def export(self, folder: Path) -> None:
        """Write, on rank 0, what a user wants of the part besides the policy, into the export's folder."""


def wanted_parts(config: Config, world_size: int, device: Any) -> list[LearnerPart]:
    """Make the parts that `config` wants, in the order of their names."""
    kinds = [LEARNER_PARTS.find(name) for name in LEARNER_PARTS.names()]
    return [kind(config, world_size, device) for kind in kinds if kind.is_wanted(config)]
