"""The typed configuration of a run. Field descriptions are what `hpc-grpo config` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from hpc_grpo.config.launch import LaunchConfig

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    name: str = Field(description="Name of the run; its folder below `root`.")
    root: Path = Field(
        Path("runs"), description="Folder that holds the run directories, made absolute; shared by all nodes."
    )
    seed: NonNegativeInt = Field(0, description="Decides the shuffle, the sampling and the initial RNG state.")

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: Path) -> Path:
        try:
            return root.expanduser().absolute()
        except RuntimeError as error:  # ~name of nobody
            raise ValueError(f"{error} Give the whole path") from error


class ModelConfig(Section):
    path: str = Field(description="Hugging Face model: a folder, or a name in the local cache.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Precision of the forward pass, of the engines and of the published weights."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")


class DatasetConfig(Section):
    path: str = Field(description="A .jsonl or .json file, a folder of a saved data set, or a Hugging Face name.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(None, description="Configuration name of a Hugging Face data set (GSM8K: main).")
    prompt_field: str = Field("question", description="Column with the prompt text.")
    answer_field: str | None = Field("answer", description="Column with the reference answer; null: none.")
    messages_field: str | None = Field(
        None, description="Column with chat messages; used instead of prompt_field when set."
    )
    max_items: PositiveInt | None = Field(None, description="Use only the first so many items.")


class DataConfig(Section):
    train: DatasetConfig
    eval: DatasetConfig | None = Field(None, description="Held-out data set for eval.")
    template: Literal["chat", "plain"] = Field(
        "chat", description="chat: the tokenizer's chat template; plain: prompt_format alone."
    )
    prompt_format: str = Field("{prompt}", description="Text around a plain prompt; {prompt} is replaced.")
    system_prompt: str | None = Field(None, description="System message put before a chat prompt.")
    max_prompt_tokens: PositiveInt = Field(512, description="A longer prompt is an error, or is dropped.")
    drop_long_prompts: bool = Field(False, description="Drop (and count) prompts that are too long.")
    shuffle: bool = Field(True, description="Shuffle every epoch, as a function of the seed and the epoch.")


class RewardConfig(Section):
    name: str = Field(description="correctness, keyword_match, strict_format, or module:function.")
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(10.0, description="Deadline of one call (one group).")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward.")


class GradingConfig(Section):
    num_workers: PositiveInt = Field(2, description="Reward processes on each node.")
    max_failed_fraction: Fraction = Field(
        0.1, description="More failed or timed-out reward calls than this in a step stop the run."
    )


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = Field(16, description="Groups trained on in one step.")
    group_size: Annotated[int, Field(ge=2)] = Field(8, description="Rollouts of one prompt.")
    max_new_tokens: PositiveInt = Field(256, description="Longest completion.")
    min_new_tokens: NonNegativeInt = Field(0, description="No end token before so many tokens.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(1.0, description="Nucleus sampling threshold.")
    max_policy_lag: NonNegativeInt = Field(
        0, description="Optimizer steps by which rollouts may be older than the learner; 0: synchronous."
    )
    logged_fraction: Fraction = Field(1.0, description="Share of groups written to rollouts/step_N.jsonl.")
    mask_truncated: bool = Field(False, description="Give completions cut by max_new_tokens no gradient.")


class EngineConfig(Section):
    engines_per_node: PositiveInt = Field(3, description="vLLM engines on each node.")
    tensor_parallel: PositiveInt = Field(1, description="GPUs (and processes) of one engine.")
    max_num_seqs: PositiveInt = Field(256, description="Requests an engine decodes at once.")
    kv_cache_gib: PositiveFloat | None = Field(
        None, description="KV cache of one engine; null: 0.25 on CPU, gpu_memory_utilization on GPU."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.9, description="Share of GPU memory an engine may use."
    )
    enforce_eager: bool = Field(False, description="No CUDA graphs. Always so on CPU.")
    prefix_caching: bool = Field(True, description="Share the prefill of a group's common prompt.")
    num_threads: PositiveInt = Field(1, description="OpenMP threads of one engine on CPU.")
    max_restarts: NonNegativeInt = Field(
        3, description="Times that an engine which died or failed is started anew before the driver ends."
    )


class LossConfig(Section):
    name: Literal["grpo"] = Field("grpo", description="Registered policy loss.")
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="The ratio is clipped above at 1 + clip_high.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the k3 KL to the reference; 0: no reference.")
    normalize_std: bool = Field(True, description="Divide advantages by the standard deviation of the group.")
    importance_correction: Literal["truncated", "none"] = Field(
        "truncated", description="Correct for the mismatch of engine and learner logprobs."
    )
    importance_cap: PositiveFloat = Field(2.0, description="Upper bound of the importance weight.")


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up.")
    warmup_steps: NonNegativeInt = Field(0, description="Steps of linear warm-up.")


class TrainConfig(OptimizerConfig):
    total_steps: PositiveInt | None = Field(None, description="Length of the run, in steps.")
    total_episodes: PositiveInt | None = Field(None, description="Length of the run, in rollouts.")
    total_epochs: PositiveInt | None = Field(None, description="Length of the run, in passes over the data.")
    num_minibatches: PositiveInt = Field(1, description="Optimizer steps per batch of rollouts.")
    zero_stage: Literal[1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage.")
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="cpu: optimizer states in host memory, updated there."
    )
    max_tokens_per_microbatch: PositiveInt = Field(8192, description="Token budget of a microbatch.")
    attention: Literal["sdpa", "flash_attention_2"] = Field(
        "sdpa", description="Attention kernel for packed documents; flash_attention_2 needs a GPU."
    )
    gradient_checkpointing: bool | None = Field(None, description="null: on with a GPU, off on CPU.")
    logprob_chunk_tokens: PositiveInt = Field(1024, description="Logits are computed for so many tokens at once.")
    num_threads: PositiveInt | None = Field(None, description="Threads of one learner on CPU; null: 1.")


class SftConfig(Section):
    batch_size: PositiveInt = Field(32, description="Demonstrations per optimizer step.")
    completion_field: str = Field("answer", description="Column with the completion to imitate.")


class WeightsConfig(Section):
    bucket_mib: PositiveInt = Field(256, description="Size of one bucket of the weight store.")
    num_buffers: Literal[1, 2] = Field(
        1, description="Versions the store holds; 2 keeps the current one readable while the next is staged."
    )
    deadline_s: PositiveFloat = Field(120.0, description="A publish that takes longer fails.")


class DeadlinesConfig(Section):
    start_s: PositiveFloat = Field(
        1800.0, description="Reading the inputs; learners, engines and weight stores coming up; the contract: each."
    )
    resume_s: PositiveFloat = Field(
        14400.0, description="Checking and loading a checkpoint, rewriting it for another number of learners included."
    )
    generate_wait_s: PositiveFloat = Field(7200.0, description="A step's rollouts, grading included.")
    train_s: PositiveFloat = Field(7200.0, description="The optimizer steps of one step.")
    checkpoint_s: PositiveFloat = Field(3600.0, description="A checkpoint and an export.")
    eval_s: PositiveFloat = Field(14400.0, description="An eval.")


class PlacementConfig(Section):
    learners_per_node: PositiveInt = Field(1, description="DeepSpeed learners on each node.")
    gpus: Literal["auto", "none"] = Field(
        "auto", description="auto: reserve GPUs where the cluster has any; none: CPUs alone."
    )
    cpus_per_learner: PositiveFloat = Field(0.5, description="CPUs reserved for a learner.")
    cpus_per_engine: PositiveFloat = Field(0.5, description="CPUs reserved for an engine.")


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = Field(
        50, description="Also after the first step and at the end; null: only then."
    )
    keep_last: PositiveInt = Field(2, description="Older checkpoints are removed.")
    export_every_steps: PositiveInt | None = Field(None, description="Hugging Face export; null: at the end.")


class EvalConfig(Section):
    every_steps: PositiveInt | None = Field(None, description="null: no eval. Else also at step 0 and at the end.")
    num_samples: PositiveInt = Field(1, description="Completions per prompt, n of pass@k.")
    pass_k: list[PositiveInt] = Field(default_factory=lambda: [1], description="Values of k; at most num_samples.")
    temperature: NonNegativeFloat = Field(1.0, description="0: greedy.")
    reward: str = Field("correctness", description="The reward that decides what counts as solved.")
    solved_at: float = Field(1.0, description="A completion with at least this reward is solved.")


class MetricsConfig(Section):
    wandb_project: str = Field("hpc-grpo", description="Used when WANDB_API_KEY is set, or in offline mode.")
    wandb_entity: str | None = Field(None, description="W&B team; null: your default.")
    wandb_mode: Literal["auto", "offline", "disabled"] = Field(
        "auto", description="auto: online if WANDB_API_KEY is set, else off."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard event files.")


class Config(Section):
    """Everything that decides a run. Saved, resolved, as config.yaml in the run directory."""

    run: RunConfig
    task: Literal["grpo", "sft"] = Field("grpo", description="grpo, or supervised fine-tuning with the same learner.")
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(
        default_factory=lambda: [RewardConfig(name="correctness")], description="Summed with their weights."
    )
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig
    sft: SftConfig = SftConfig()
    weights: WeightsConfig = WeightsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def run_path(self) -> Path:
        """The run directory, absolute."""
        return self.run.root / self.run.name

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens: prompt and completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens
