"""The typed configuration of a run, section by section: each lies in the file that its import names.

A new section is a class, in a file of its own or beside its kin, and a field of `Config`.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from hpc_grpo.config.data import DataConfig, ModelConfig, SourceConfig
from hpc_grpo.config.launch import LaunchConfig, PlacementConfig
from hpc_grpo.config.loss import LossConfig
from hpc_grpo.config.rollout import EngineConfig, GradingConfig, RewardConfig, RolloutConfig, WeightsConfig
from hpc_grpo.config.run import CheckpointConfig, DeadlinesConfig, EvalConfig, MetricsConfig, RunConfig
from hpc_grpo.config.section import PathText, Section
from hpc_grpo.config.train import DistillConfig, PpoConfig, SftConfig, TrainConfig
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import Needs


class Config(Section):
    """Decides a run. Its resolved copy is config.yaml in the run directory."""

    run: RunConfig
    task: PathText = Field(
        "grpo",
        description="An algorithm of algorithms/: grpo, ppo, sft (supervised fine-tuning), or distill (on-policy).",
    )
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(
        default_factory=lambda: [RewardConfig(name="correctness")], description="Summed with their weights."
    )
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    loss: LossConfig = Field(default_factory=LossConfig)
    ppo: PpoConfig = PpoConfig()
    train: TrainConfig
    sft: SftConfig = SftConfig()
    distill: DistillConfig = DistillConfig()
    weights: WeightsConfig = WeightsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    launch: LaunchConfig = LaunchConfig()

    @field_validator("task")
    @classmethod
    def _absolute(cls, task: str) -> str:
        """Resolve a user's file: commands and jobs in other folders load this config too."""
        path, separator, name = task.rpartition(":")
        return f"{Path(path).absolute()}:{name}" if separator and path.endswith(".py") else task

    @property
    def run_path(self) -> Path:
        return self.run.root / self.run.name

    @property
    def needs(self) -> Needs:
        """Return what the run's algorithm needs. Raises ConfigError where `task` names none."""
        needs: Needs = ALGORITHMS.find(self.task)(self).needs
        return needs

    @property
    def cache_path(self) -> Path:
        """The folder of tokenized data."""
        return Path(self.data.cache_dir) if self.data.cache_dir else self.run.root / ".data"

    def rewards_of(self, source: SourceConfig) -> list[RewardConfig]:
        return self.rewards if source.rewards is None else source.rewards

    @property
    def reward_sets(self) -> list[list[RewardConfig]]:
        """List what prompts are graded by, in the order of their sources: each distinct list of rewards once."""
        sources = [*self.data.sources(for_eval=False), *self.data.sources(for_eval=True)]
        found: list[list[RewardConfig]] = []
        for _, source in sources:
            if (rewards := self.rewards_of(source)) not in found:
                found.append(rewards)
        return found

    @property
    def all_rewards(self) -> list[RewardConfig]:
        """List the rewards of all sets, one set after the other."""
        return [reward for rewards in self.reward_sets for reward in rewards]

    @property
    def rewards_by_key(self) -> dict[str, RewardConfig]:
        """Map the keys of the config that name rewards, such as rewards.0, to them."""
        named = {f"rewards.{position}": reward for position, reward in enumerate(self.rewards)}
        for key, source in [*self.data.sources(for_eval=False), *self.data.sources(for_eval=True)]:
            named |= {f"{key}.rewards.{position}": reward for position, reward in enumerate(source.rewards or ())}
        return named

    @property
    def reads_eval_data(self) -> bool:
        """Tell whether the eval sets are read: to evaluate, or to keep their prompts out of training."""
        return bool(self.data.eval_data) and (self.eval.every.is_ever or self.data.deduplicate)

    def eval_settings(self, eval_set: str) -> EvalConfig:
        """Return `eval` as it is for one set; "" is data.eval's, or what was held out."""
        own = self.data.eval_sets[eval_set].own_settings if eval_set else {}
        return self.eval.model_copy(update=own)

    @property
    def engine_dtype(self) -> str:
        return self.engine.dtype or self.model.dtype

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence in tokens: prompt and completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens
