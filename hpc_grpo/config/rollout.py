"""Sections `rollout`, `environment`, `rewards`, `grading`, `engine`: sampling, grading, the engines."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from typing_extensions import TypedDict  # pydantic refuses `typing.TypedDict` before Python 3.12

from hpc_grpo.config.checked import checked
from hpc_grpo.registry import REWARDS
from hpc_grpo.section import Fraction, PathText, Section, TopP, as_section
from hpc_grpo.types import SamplingSpec

REWARD_LOAD_S = 120.0
"""Deadline for a reward worker to import the rewards. A shared file system with a cold cache is slow."""


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = Field(16, description="Prompts of one step; each prompt gives one group.")
    group_size: Annotated[int, Field(ge=2)] = Field(8, description="Rollouts of one prompt.")
    max_new_tokens: PositiveInt = Field(256, description="Longest completion, in tokens.")
    min_new_tokens: NonNegativeInt = Field(0, description="Fewest new tokens before the end token is allowed.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: TopP = Field(1.0, description="Nucleus sampling threshold.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Texts that end a completion. The completion keeps them. Example: ['</answer>']."
    )
    max_policy_lag: NonNegativeInt = Field(
        0, description="Optimizer steps that rollouts may be behind the learner. 0: synchronous."
    )
    logged_fraction: Fraction = Field(1.0, description="Share of groups written to rollouts/step_N.jsonl.")
    mask_truncated: bool = Field(
        False,
        description="Completions that reach max_new_tokens, and episodes that a limit of `environment` cuts, give no "
        "gradient.",
    )
    overlong_tokens: PositiveInt | None = Field(
        None,
        description=(
            "Soft length penalty (DAPO) over the last N tokens before max_new_tokens. It grows linearly from 0 "
            "to 1. Default: no penalty."
        ),
    )
    drop_zero_variance: bool = Field(
        False, description="Leave out groups whose advantages are all 0, also from loss.denominator."
    )
    dynamic_sampling: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description=(
            "Dynamic sampling (DAPO): replace groups whose advantages are all 0 by groups of the next "
            "prompts. Value: the largest number of groups of a step, divided by prompts_per_step. Default: off."
        ),
    )

    def sampling(self, temperature: float, top_p: float) -> SamplingSpec:
        return SamplingSpec(self.max_new_tokens, self.min_new_tokens, temperature, top_p, tuple(self.stop))


class EnvironmentArgs(TypedDict, total=False):
    """Keyword arguments of an environment's class. Our code also reads the argument named here."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    tools: list[PathText]


class EnvironmentConfig(Section):
    name: PathText = Field(description="An environment of episodes/builtin, or your class: module:Class.")
    args: EnvironmentArgs = Field(
        default_factory=EnvironmentArgs,
        description=(
            "Keyword arguments of the class. The environment tools has the argument tools: a list of python, "
            "calculator, or your functions (module:function)."
        ),
    )
    python: PathText | None = Field(
        None, description="Python of the environment processes, such as /path/to/venv/bin/python. Default: the run's."
    )
    max_turns: PositiveInt = Field(8, description="Largest number of completions in an episode.")
    max_tokens: PositiveInt = Field(
        2048, description="Token limit of an episode after its first prompt, the environment's tokens included."
    )
    timeout_s: PositiveFloat = Field(
        30.0, description="Deadline in seconds of each call of the environment. For an agent: between two completions."
    )
    num_workers: PositiveInt = Field(2, description="Environment processes of each engine.")
    memory_gib: PositiveFloat = Field(4.0, description="Memory limit of each environment process, in GiB.")
    pass_env: list[str] = Field([], description="Secret environment variables that the environment reads.")


Environment = Annotated[EnvironmentConfig, BeforeValidator(as_section)]


class RewardConfig(Section):
    name: PathText = Field(description="A reward of rewards/builtin, or yours: path/to/file.py:function.")
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(
        10.0, description="Deadline in seconds for a group. For a built-in that calls no server: for a completion."
    )
    pass_env: list[str] = Field(
        [],
        description=(
            "Secret environment variables that the reward reads. The reward also gets the variables "
            "named by its args.api_key_env and args.token_env, and no other secrets."
        ),
    )
    args: dict[str, Any] = Field({}, description="Settings of a built-in reward; keyword arguments of your own.")

    def settings(self, key: str = "rewards.N") -> Section | None:
        """Return the validated `args` of a built-in reward, None for a user's function.

        Raises ConfigError for unknown keys and wrong values. The error text names them below `key`.
        """
        if ":" in self.name:
            return None
        section: type[Section] = REWARDS.find(self.name).settings
        return checked(section, self.args, f"The reward {self.name}", key, "args")

    def longest_call_s(self, num_completions: int) -> float:
        """Return the longest time in seconds that a group may take."""
        if ":" in self.name or not REWARDS.find(self.name).is_one_by_one:
            return self.timeout_s
        # `rewards.scoring` stops a group once more than half of its completions missed the deadline.
        completion_s: float = getattr(self.settings(), "completion_s", 0.0)
        return self.timeout_s * (num_completions // 2 + 1) + completion_s * num_completions


class GradingConfig(Section):
    num_workers: PositiveInt = Field(2, description="Reward processes on each node.")
    max_failed_fraction: Fraction = Field(
        0.1,
        description=(
            "Stop the run if rewards or environments failed for a larger share of the last prompts (20 or more). One "
            "failure is allowed. In training, missed deadlines count only if every prompt failed. 0: every failure "
            "stops the run."
        ),
    )


class _Ngram(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    method: Literal["ngram"]
    num_speculative_tokens: PositiveInt


class VllmArgs(TypedDict, total=False):
    """Keyword arguments of vllm.EngineArgs. The plan also reads the arguments named here. vLLM checks the others."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    max_num_seqs: PositiveInt
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)]
    max_num_batched_tokens: PositiveInt | None
    enforce_eager: bool
    enable_prefix_caching: bool
    async_scheduling: bool | None
    speculative_config: _Ngram | None


_OF_OTHER_KEYS = {
    "model|model_weights|hf_config_path|config_format|tokenizer(_.*)?|(code_)?revision": "model.path",
    "dtype|quantization(_config)?|allow_deprecated_quantization": "engine.dtype",
    "seed": "run.seed",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens, or environment.max_tokens",
    "(override_)?generation_config|logits_processors|watermark_config|diffusion_config": "rollout",
    "max_num_queued_.*": "engine.vllm.max_num_seqs",
    "tensor_parallel_size": "engine.tensor_parallel",
    "kv_cache_memory_bytes|num_gpu_blocks_override": "engine.kv_cache_gib",
    "spec_.*": "engine.vllm.speculative_config",
    "enable_sleep_mode|sleep_.*|enable_cumem_allocator": "placement.colocate",
    "enable_return_routed_experts|aux_output_config": "train.router_replay",
    "hf_token": "HF_TOKEN in the environment",
    # Processes, and the transport of weights and samples. Learners and driver depend on their values.
    "_.*|numa_bind.*|(data|pipeline|(prefill|decode)_context)_parallel_.*|nnodes|node_rank|master_.*|device_ids|.*elastic_ep.*|.*eplb.*"
    "|worker_cls|worker_extension_cls|distributed_executor_backend|scheduler_cls|scheduling_policy|enable_chunked_prefill"
    "|trust_remote_code|hf_overrides|load_format|model_class_overrides|model_loader_extra_config|skip_tokenizer_init"
    "|enable_trace_replay|tokens_only|runner|convert|pooler_config|enable_prompt_embeds|logprobs_mode|max_logprobs|return_sampling_mask"
    "|.*lora.*|weight_transfer_config|(cpu_)?offload_.*|kv_offloading_.*|(kv|ec)_transfer_config|disable_sliding_window"
    "|profiler_config": "hpc-grpo",
}
"""Arguments of vllm.EngineArgs, as patterns -> what decides them instead of `engine.vllm`."""


def owner_of(name: str) -> str | None:
    """Return the config key that decides an argument of vLLM; None if `engine.vllm` may set it."""
    return next((owner for pattern, owner in _OF_OTHER_KEYS.items() if re.fullmatch(pattern, name)), None)


class EngineConfig(Section):
    engines_per_node: PositiveInt = Field(3, description="vLLM engines on each node.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Precision of the engines and of their weights. Default: model.dtype."
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs (and processes) of one engine.")
    kv_cache_gib: PositiveFloat | None = Field(
        None, description="KV cache of one engine. Default: 0.25 on CPU; vllm.gpu_memory_utilization decides on GPU."
    )
    vllm: VllmArgs = Field(
        default_factory=VllmArgs,
        description=(
            "Arguments of vllm.EngineArgs. Examples: max_num_seqs (requests decoded at once, default: 256), "
            "gpu_memory_utilization (default: 0.9), enforce_eager: true, enable_prefix_caching: false, "
            "block_size (tokens; only whole blocks are cached; default on CPU: 32), "
            "max_num_batched_tokens (default: 8192 on GPU, 2048 on CPU), async_scheduling: false, "
            "speculative_config: {method: ngram, num_speculative_tokens: 4}."
        ),
    )
    num_threads: PositiveInt = Field(1, description="OpenMP threads of one engine on CPU.")

    @field_validator("vllm")
    @classmethod
    def _are_not_ours(cls, args: VllmArgs) -> VllmArgs:
        for name in args:
            if (owner := owner_of(name)) is not None:
                raise ValueError(f"{name} is set by {owner}: remove it here")
        return args

    @property
    def max_num_seqs(self) -> int:
        """Return the number of requests that an engine decodes at once."""
        return self.vllm.get("max_num_seqs", 256)

    @property
    def gpu_memory_utilization(self) -> float:
        """Return the share of GPU memory that an engine may use."""
        return self.vllm.get("gpu_memory_utilization", 0.9)

    @property
    def ngram_tokens(self) -> int | None:
        """Return the number of tokens that an engine guesses from earlier text of prompt and completion (ngram)."""
        guesses = self.vllm.get("speculative_config")
        return None if guesses is None else guesses["num_speculative_tokens"]
