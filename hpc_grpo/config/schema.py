"""The typed configuration of a run, section by section. Each section is in the file that its import names.

A new section is a class in one of these files and a field of `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hpc_grpo.algorithms.losses import GrpoLoss, Loss
from hpc_grpo.config.data import DataConfig, ModelConfig, SourceConfig
from hpc_grpo.config.launch import LaunchConfig, PlacementConfig
from hpc_grpo.config.rollout import EngineConfig, Environment, GradingConfig, RewardConfig, RolloutConfig
from hpc_grpo.config.run import CheckpointConfig, DeadlinesConfig, EvalConfig, MetricsConfig, RunConfig
from hpc_grpo.config.train import GrpoTask, LoraConfig, OwnArgs, Task, TrainConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ALGORITHMS, ENVIRONMENTS
from hpc_grpo.section import Section, as_section
from hpc_grpo.types import Needs

_OF_REWARDS = ("rollout.drop_zero_variance", "rollout.dynamic_sampling")
_NOT_OF_TASK: dict[str, tuple[str, ...]] = {
    "ppo": ("loss.advantage", *_OF_REWARDS),
    "distill": _OF_REWARDS,
    "sft": (
        "environment", "loss", "rollout.prompts_per_step", "rollout.group_size", "rollout.max_policy_lag",
        "rollout.logged_fraction", "rollout.mask_truncated", "rollout.overlong_tokens", *_OF_REWARDS,
        "train.share_prompts", "lora.publish",
    ),
}  # fmt: skip
"""Task -> the sections and keys that the task lacks. Setting one is an error. The resolved config leaves them out.

Under sft, `hpc-grpo model eval` samples with the keys that remain in `rollout`.
"""


class Config(Section):
    """The complete config of a run. The run directory has a copy, config.yaml."""

    run: RunConfig
    task: Task = Field(
        GrpoTask(), description="grpo, ppo (with a critic), sft (supervised fine-tuning), or distill (on-policy)."
    )
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(
        default_factory=lambda: [RewardConfig(name="correctness")],
        description="Rewards, summed with their weights. With an environment the default is [].",
    )
    environment: Environment | None = Field(
        None,
        description=(
            "Environment that the model acts in, turn by turn (docs/environments.md). Default: "
            "none. A rollout is then one completion."
        ),
    )
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    loss: Loss = GrpoLoss()
    train: TrainConfig
    lora: LoraConfig | None = Field(
        None, description="Train an adapter and keep the model's weights (docs/training.md); null: train all weights."
    )
    deadlines: DeadlinesConfig = DeadlinesConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="before")
    @classmethod
    def _has_only_what_the_task_has(cls, values: Any) -> Any:
        """Raise ConfigError for a key that the task does not have. null removes a key that a base file sets."""
        if not isinstance(values, Mapping):
            return values
        kept, chosen = dict(values), as_section(values.get("task"))
        if kept.get("environment") is not None:
            kept.setdefault("rewards", [])
        task = chosen.get("name") if isinstance(chosen, Mapping) else getattr(chosen, "name", None)
        lacking = _NOT_OF_TASK.get(str(task), ())
        taken = {key: value for key in lacking if not _is_null(value := _take_out(kept, key))}
        if taken:
            nulls = " ".join(f"{key}=null" for key in taken)
            parts = {part for key in taken for part in (key, key.partition(".")[0])}
            having = ["grpo", *(name for name, others in _NOT_OF_TASK.items() if not parts & {*others})]
            written = ", ".join(_first_key(*pair) for pair in taken.items())
            raise ConfigError(
                f"{written}: task = {task} has no such key. Remove it (on the command line: {nulls}), or set task "
                f"to {' or '.join(having)}."
            )
        return kept

    @model_serializer(mode="wrap")
    def _without_what_the_task_lacks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for key in self.lacking:
            _take_out(values, key)
        return values

    @property
    def lacking(self) -> tuple[str, ...]:
        """List the sections and keys that the task does not have. Nothing reads their defaults."""
        return _NOT_OF_TASK.get(self.task.name, ())

    @property
    def task_args(self) -> OwnArgs:
        """Return the task's args. Args that the task lacks have their defaults."""
        return OwnArgs.model_construct(**dict(getattr(self.task, "args", ())))

    @property
    def publishes_adapter(self) -> bool:
        return self.lora is not None and self.lora.publish == "adapter" and self.needs.rollouts

    @property
    def reference_is_base(self) -> bool:
        """Return whether the KL's reference is the policy without its adapter. Then learners load no second model."""
        kl = self.loss.kl
        return self.needs.reference and self.lora is not None and kl.reference is None and kl.refresh_steps is None

    @property
    def run_path(self) -> Path:
        return self.run.root / self.run.name

    @property
    def needs(self) -> Needs:
        """Return what the run's algorithm needs. Raises ConfigError if `task` names no algorithm."""
        needs: Needs = ALGORITHMS.find(self.task.name)(self).needs
        return needs

    @property
    def models(self) -> dict[str, str]:
        """Map each config key of a model to the model: `model.path`, then the further models that learners load."""
        needs = self.needs
        further = {
            "loss.kl.reference": self.loss.kl.reference if needs.reference else None,
            "task.args.teacher": self.task_args.teacher if needs.teacher else None,
            "task.args.critic": self.task_args.critic if needs.critic else None,
        }
        return {"model.path": self.model.path, **{key: path for key, path in further.items() if path is not None}}

    @property
    def scoring_models(self) -> dict[str, str]:
        """Map each config key of a model that scores sampled tokens to the model. All share the policy's vocabulary."""
        return {key: path for key, path in self.models.items() if key in ("loss.kl.reference", "task.args.teacher")}

    @property
    def items_per_step(self) -> int:
        """Return the number of prompts of a step, or of demonstrations."""
        items: int = ALGORITHMS.find(self.task.name)(self).items_per_step
        return items

    def optimizer_steps(self, steps: int) -> int:
        """Return the number of optimizer steps in `steps` training steps."""
        return steps * self.train.num_minibatches

    def rewards_of(self, source: SourceConfig) -> list[RewardConfig]:
        return self.rewards if source.rewards is None else source.rewards

    @property
    def environments(self) -> dict[str, tuple[SourceConfig, Environment]]:
        """Map the key of each source with an environment to (source, environment).

        `Prompt.environment` is a position in this mapping. A held-out eval set has the environment of its source.
        """
        sources = self.data.sources() if self.needs.rollouts else []
        chosen = {key: (source, source.environment or self.environment) for key, source in sources}
        return {key: (source, own) for key, (source, own) in chosen.items() if own is not None}

    @property
    def environment_functions(self) -> dict[str, str]:
        """Map each key that names a user's environment class or tool to its name."""
        named: dict[str, str] = {}
        for key, (_, own) in self.environments.items():
            if own.name.partition(":")[0] not in ENVIRONMENTS.names():
                named[f"{key}.environment.name"] = own.name
            tools = enumerate(own.args.get("tools", ()))
            named |= {f"{key}.environment.args.tools.{number}": tool for number, tool in tools if ":" in tool}
        return named

    @property
    def reward_sets(self) -> list[list[RewardConfig]]:
        """List the distinct lists of rewards, in the order of the sources."""
        found: list[list[RewardConfig]] = []
        for _, source in self.data.sources():
            if (rewards := self.rewards_of(source)) not in found:
                found.append(rewards)
        return found

    @property
    def all_rewards(self) -> list[RewardConfig]:
        """List the rewards of all sets, each distinct one once."""
        found: list[RewardConfig] = []
        for rewards in self.reward_sets:
            found += [reward for reward in rewards if reward not in found]
        return found

    @property
    def rewards_by_key(self) -> dict[str, RewardConfig]:
        """Map each config key of a reward, such as rewards.0, to that reward."""
        named = {f"rewards.{position}": reward for position, reward in enumerate(self.rewards)}
        for key, source in self.data.sources():
            named |= {f"{key}.rewards.{position}": reward for position, reward in enumerate(source.rewards or ())}
        return named

    @property
    def reads_eval_data(self) -> bool:
        """Return whether the eval sets are read: to evaluate, or to keep their prompts out of training."""
        return bool(self.data.eval_sources) and (self.eval.every is not None or self.data.deduplicate)

    def eval_settings(self, eval_set: str) -> EvalConfig:
        """Return `eval` with the overrides of one set; "" is data.eval or data.held_out."""
        own = self.data.eval_sets[eval_set].own_settings if eval_set else {}
        top_p = self.rollout.top_p if self.eval.top_p is None else self.eval.top_p
        return self.eval.model_copy(update={"top_p": top_p, **own})

    @property
    def engine_dtype(self) -> str:
        return self.engine.dtype or self.model.dtype

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence in tokens: prompt and completion, or episode."""
        return self.data.max_prompt_tokens + self.longest_rollout

    @property
    def longest_rollout(self) -> int:
        """Return the token limit after a prompt: of a completion, or of an episode."""
        return max(self._rollout_lengths.values())

    @property
    def longest_sequence(self) -> str:
        """Name the keys that decide `max_model_len`, for an error."""
        lengths = self._rollout_lengths
        return f"data.max_prompt_tokens + {max(lengths, key=lengths.__getitem__)}"

    @property
    def most_sampled(self) -> int:
        """Return the limit of tokens that the model writes after a prompt: in a completion, or in all turns."""
        return min(self.longest_rollout, self.rollout.max_new_tokens * self.most_turns)

    @property
    def most_turns(self) -> int:
        """Return the limit of a rollout's turns."""
        return max((environment.max_turns for _, environment in self.environments.values()), default=1)

    @property
    def _rollout_lengths(self) -> dict[str, int]:
        """Map the keys that limit the length after a prompt to their values."""
        played = self.environments
        lengths = {
            f"{'environment' if source.environment is None else f'{key}.environment'}.max_tokens": own.max_tokens
            for key, (source, own) in played.items()
        }
        is_all = played and len(played) == len(self.data.sources())
        return lengths if is_all else {"rollout.max_new_tokens": self.rollout.max_new_tokens, **lengths}


def _take_out(values: dict[str, Any], key: str) -> Any:
    """Remove a key or `section.key` from `values` without changing its sections. Return its value, or None."""
    section, _, name = key.rpartition(".")
    if not section:
        return values.pop(key, None)
    inner = as_section(values.get(section))
    if not isinstance(inner, Mapping) or name not in inner:
        return None
    values[section] = {own: value for own, value in inner.items() if own != name}
    return inner[name]


def _first_key(key: str, value: Any) -> str:
    """Return the key of a value. For a section, return the key of its first value."""
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _is_null(value: Any) -> bool:
    """Return whether a value is null, or a section that holds only nulls."""
    return value is None or (isinstance(value, Mapping) and bool(value) and all(map(_is_null, value.values())))
