"""How long a run is, in steps; and where a step lies in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hpc_grpo.config import Config


@dataclass(frozen=True)
class TrainLength:
    """`items_per_step` are prompts (GRPO) or demonstrations (SFT); an epoch has `items_per_epoch` of them."""

    total_steps: int
    items_per_step: int
    items_per_epoch: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, ceil(self.items_per_epoch / self.items_per_step))

    @property
    def total_epochs(self) -> int:
        return max(1, ceil(self.total_steps * self.items_per_step / self.items_per_epoch))

    def epoch_and_step(self, step: int) -> tuple[int, int]:
        """Epoch and step within it, both from 1, of finished step `step` (from 1)."""
        first_item = (max(step, 1) - 1) * self.items_per_step
        epoch, place = divmod(first_item, self.items_per_epoch)
        return epoch + 1, place // self.items_per_step + 1


def train_length(config: Config, items_per_epoch: int) -> TrainLength:
    """The length in steps of whichever of train.total_steps, total_episodes and total_epochs is set.

    Episodes are rollouts; under SFT they are demonstrations.
    """
    train, rollout = config.train, config.rollout
    items_per_step = config.sft.batch_size if config.task == "sft" else rollout.prompts_per_step
    episodes_per_item = 1 if config.task == "sft" else rollout.group_size
    if train.total_steps is not None:
        total = train.total_steps
    elif train.total_episodes is not None:
        total = ceil(train.total_episodes / (items_per_step * episodes_per_item))
    else:
        total = ceil((train.total_epochs or 1) * items_per_epoch / items_per_step)
    return TrainLength(total, items_per_step, items_per_epoch)
