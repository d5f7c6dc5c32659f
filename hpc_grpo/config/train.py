"""Sections `train` and `task`: the optimizer, the length of a run, the learner's memory, each algorithm's args."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator
from typing_extensions import TypedDict  # pydantic refuses `typing.TypedDict` before Python 3.12

from hpc_grpo.section import ByName, Fraction, PathText, Section, as_section

_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamwArgs(TypedDict):
    betas: tuple[_Beta, _Beta]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat


_ADAMW = AdamwArgs(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def _completed(args: Any) -> Any:
    """Add the defaults of missing arguments. Raises ValueError for an unknown argument."""
    if isinstance(args, Mapping) and (unknown := [name for name in args if name not in _ADAMW]):
        raise ValueError(f"has no {unknown[0]!r}. It has: {', '.join(_ADAMW)}")
    return {**_ADAMW, **args} if isinstance(args, Mapping) else args


class CallbackConfig(Section):
    name: PathText = Field(
        description="Your function: on_step(step, metrics, evals, **args) returns None, or a reason to end the run."
    )
    args: dict[str, Any] = Field({}, description="Keyword arguments of the function.")


class TrainConfig(Section):
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    adamw: Annotated[AdamwArgs, BeforeValidator(_completed)] = Field(
        _ADAMW, description="Arguments of torch.optim.AdamW. Biases and norms have no weight decay."
    )
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up: constant, linear or cosine."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Optimizer steps of linear warm-up.")
    total_steps: PositiveInt | None = Field(None, description="Length of the run, in steps.")
    total_episodes: PositiveInt | None = Field(None, description="Length of the run, in rollouts.")
    total_epochs: PositiveInt | None = Field(None, description="Length of the run, in passes over the data.")
    on_step: Annotated[CallbackConfig, BeforeValidator(as_section)] | None = Field(
        None, description="Your function, called after each step; it may end the run (docs/training.md). Default: none."
    )
    num_minibatches: PositiveInt = Field(1, description="Optimizer steps in one step, each on a part of the batch.")
    zero_stage: Literal[1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage.")
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="cpu: keep optimizer states in host memory and update them on the CPU."
    )
    max_tokens_per_microbatch: PositiveInt = Field(8192, description="Token budget of a microbatch.")
    sequence_parallel: PositiveInt = Field(
        1,
        description="Number of learners that share a microbatch, each with a slice of its tokens. Must divide the "
        "learners of the run and the attention heads. Not with flash_attention_2.",
    )
    share_prompts: bool | None = Field(
        None,
        description="Compute a prompt once for all completions of its group. Not with flash_attention_2. "
        "Default: true if model.device is cpu.",
    )
    attention: Literal["sdpa", "varlen", "flash_attention_2"] = Field(
        "sdpa",
        description=(
            "Attention kernel for packed documents. varlen is torch's, without padding and with sliding "
            "windows. varlen and flash_attention_2 (package flash-attn) need a GPU."
        ),
    )
    gradient_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass. Default: on with a GPU, off on CPU."
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the load-balancing loss of a mixture-of-experts model, computed for each sequence."
    )
    router_replay: bool = Field(
        False,
        description="Learners use the experts that engines chose for each token of a mixture-of-experts model (R3).",
    )
    num_threads: PositiveInt | None = Field(None, description="Threads of one learner on CPU. Default: 1.")

    @property
    def functions(self) -> dict[str, str]:
        """Return each key that names a user's function, with the function's name."""
        return {} if self.on_step is None else {"train.on_step.name": self.on_step.name}


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=1, le=512)] = Field(16, description="Rank of each adapter.")
    alpha: PositiveFloat = Field(32.0, description="The adapter's output is multiplied by alpha / rank.")
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="Layers that get an adapter: all-linear, or names such as [q_proj, v_proj]."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Dropout before an adapter; above 0 only with task: sft."
    )
    publish: Literal["merged", "adapter"] = Field(
        "merged", description="merged: engines get all weights, adapter included. adapter: only the new adapter."
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _all_or_a_list(cls, targets: object) -> object:
        if isinstance(targets, str) and targets != "all-linear":
            raise ValueError("must be all-linear, or a list such as [q_proj, v_proj]")
        return targets


class PpoArgs(Section):
    critic: PathText | None = Field(
        None, description="Folder of an exported critic to start from. Default: model.path with a value head of zeros."
    )
    critic_lr: PositiveFloat = Field(1e-5, description="Learning rate of the critic, constant over the run.")
    discount: Fraction = Field(1.0, description="Gamma: discount factor of later rewards, per token.")
    gae_lambda: Fraction = Field(0.95, description="Lambda of generalized advantage estimation. 1: the full return.")
    value_clip: PositiveFloat | None = Field(
        0.2, description="Clip range of a value's change in one step. null: no clip."
    )


class SftArgs(Section):
    batch_size: PositiveInt = Field(32, description="Demonstrations of a step.")


class DistillArgs(Section):
    teacher: PathText | None = Field(
        None, description="Teacher to learn from: a Hugging Face model with the tokenizer of model.path."
    )
    reward_coef: NonNegativeFloat = Field(
        0.0,
        description=(
            "Weight of the advantages that loss.advantage computes from rewards. The teacher's advantage, log teacher "
            "- log policy, has weight 1. 0: rewards may be []."
        ),
    )


class GrpoTask(Section):
    name: Literal["grpo"] = "grpo"


class PpoTask(Section):
    name: Literal["ppo"] = "ppo"
    args: PpoArgs = PpoArgs()


class DistillTask(Section):
    name: Literal["distill"] = "distill"
    args: DistillArgs = DistillArgs()


class SftTask(Section):
    name: Literal["sft"] = "sft"
    args: SftArgs = SftArgs()


class OwnArgs(PpoArgs, DistillArgs, SftArgs):
    """The args of all built-in tasks: a user's algorithm may inherit from any of them."""


class OwnTask(Section):
    name: PathText = Field(description="Your class: module:Class or path/to/file.py:Class.")
    args: OwnArgs = OwnArgs()

    @field_validator("name")
    @classmethod
    def _absolute(cls, name: str) -> str:
        """Make the path of a user's file absolute: commands and jobs in other folders load this config too."""
        path, _, attribute = name.rpartition(":")
        return f"{Path(path).absolute()}:{attribute}" if path.endswith(".py") else name


Task = Annotated[GrpoTask | PpoTask | DistillTask | SftTask | OwnTask, ByName("grpo")]
