"""Sections `run`, `checkpoint`, `deadlines`, `eval`, `metrics`: a run's folder, checkpoints, evals and metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from typing_extensions import TypedDict  # pydantic refuses `typing.TypedDict` before Python 3.12

from hpc_grpo.section import LocalPath, PathText, Section, TopP

_UNITS = {"step": 1, "epoch": 1, "s": 1, "min": 60, "h": 3600}
_SPAN = re.compile(r"([0-9.]+) *(step|epoch|s|min|h)s?")


@dataclass(frozen=True)
class Every:
    """An interval: a number of steps, epochs or seconds, whichever comes first."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @property
    def known_steps(self) -> int | None:
        """Return the interval in steps; None if it has epochs or seconds."""
        return self.steps if self.epochs is None and self.seconds is None else None

    @classmethod
    def read(cls, value: object) -> object:
        """Parse text such as `50 steps, 30 min`. A whole number means steps. Returns None and an `Every` unchanged.

        Raises ValueError.

        >>> Every.read("2 epochs, 30 min"), str(Every.read("0.5 h")), Every.read(5)
        (Every(steps=None, epochs=2, seconds=1800.0), '1800 s', Every(steps=5, epochs=None, seconds=None))
        """
        if value is None or isinstance(value, Every):
            return value
        spans: dict[str, Any] = {}
        for part in str(f"{value} steps" if isinstance(value, int) else value).split(","):
            found = _SPAN.fullmatch(part.strip())
            number = float(found[1]) * _UNITS[found[2]] if found and found[1].count(".") < 2 else 0.0
            name = {"step": "steps", "epoch": "epochs"}.get(found[2], "seconds") if found else ""
            if number <= 0.0 or name in spans or (name != "seconds" and number != int(number)):
                raise ValueError("must be such as '50 steps', '2 epochs', '30 min', or several: '50 steps, 30 min'")
            spans[name] = number if name == "seconds" else int(number)
        return cls(**spans)

    def __str__(self) -> str:
        counts = {"step": self.steps, "epoch": self.epochs}
        spans = [f"{count} {unit}{'s' * (count > 1)}" for unit, count in counts.items() if count is not None]
        return ", ".join([*spans, *([] if self.seconds is None else [f"{self.seconds:.12g} s"])])


_OF_THE_RUN = ("name", "id", "resume", "dir", "config", "settings")
"""Arguments of wandb.init that tie the W&B run to the run directory."""

Often = Annotated[InstanceOf[Every], BeforeValidator(Every.read), PlainSerializer(str)]


class RunConfig(Section):
    name: str = Field(description="Name of the run; its folder below `root`.")
    root: Annotated[Path, LocalPath] = Field(
        Path("runs"), description="Folder of the run directories, made absolute. See launch.disks."
    )
    seed: NonNegativeInt = Field(0, description="Decides the shuffle, the sampling and the initial RNG state.")

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: Path) -> Path:
        return root.absolute()


class CheckpointConfig(Section):
    every: Often | None = Field(
        Every(steps=50),
        description=(
            "Interval of checkpoints: 50 steps, 2 epochs, 30 min (s, h), or several, whichever comes first. The first "
            "step and the end always get a checkpoint. null: only these two. Time counts from each job's start."
        ),
    )
    behind_training: bool = Field(
        True,
        description=(
            "Copy a checkpoint to host memory and write it while training continues. The copy stays in "
            "memory. false: training waits for the disk."
        ),
    )
    keep_last: PositiveInt = Field(2, description="Number of newest checkpoints to keep. Older ones are removed.")
    keep_batches: NonNegativeInt = Field(
        0, description="Keep the batches of the newest N steps for `hpc-grpo model replay`, 17 bytes a token. 0: none."
    )
    export_every: Often | None = Field(
        None,
        description="Interval of Hugging Face exports, each with a checkpoint. Form: `every`. Default: at the end.",
    )
    keep_exports: PositiveInt | None = Field(
        None, description="Exports to keep. Older ones are removed, except the newest and the final one. Default: all."
    )


class DeadlinesConfig(Section):
    """Time limits after which a process or a phase counts as stuck."""

    start_s: PositiveFloat = Field(
        1800.0,
        description=(
            "Seconds for the start of the driver and of each actor, and for an actor's first work. A "
            "checkpoint or export may take 2 times this, a resume 8 times. Before the longest time of a "
            "phase is known, a step's rollouts and its training may take 4 times, an eval 8 times."
        ),
    )
    silent_s: PositiveFloat = Field(
        60.0,
        description=(
            "Smallest deadline in seconds for a learner, engine or grader that works. The deadline is 10 times its "
            "longest pause in this run. A phase of the driver has at least 5 times this, a publish has 2 times."
        ),
    )

    @property
    def publish_s(self) -> float:
        """Return the deadline of a publish of weights."""
        return 2 * self.silent_s


class EvalConfig(Section):
    every: Often | None = Field(
        None,
        description=(
            "Interval of evals, written like checkpoint.every. Evals also run at step 0 and at the end. "
            "Default: no evals."
        ),
    )
    num_samples: PositiveInt = Field(
        1, description="Completions per prompt (n). Evals report pass@k for the powers of two below n, and for n."
    )
    temperature: NonNegativeFloat = Field(1.0, description="Sampling temperature of evals. 0: greedy.")
    top_p: TopP | None = Field(None, description="Nucleus sampling threshold. Default: rollout.top_p.")
    reward: PathText | None = Field(
        None,
        description=(
            "Reward that decides which completions are solved. Default: correctness. A source without "
            "that reward uses its first reward."
        ),
    )
    solved_at: float = Field(1.0, description="A completion with at least this reward is solved.")
    metrics: list[PathText] = Field(
        [], description="Your functions that compute metrics from graded completions: module:function."
    )

    @property
    def functions(self) -> dict[str, str]:
        """Return each key that names a user's function, with the function's name."""
        return {f"eval.metrics.{position}": name for position, name in enumerate(self.metrics)}


class WandbArgs(TypedDict, total=False):
    """Keyword arguments of wandb.init. Our code also reads the arguments named here. W&B checks the others."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    project: str
    mode: Literal["auto", "offline", "disabled"]


class MetricsConfig(Section):
    wandb: WandbArgs = Field(
        default_factory=WandbArgs,
        description=(
            "Arguments of wandb.init: project (default: hpc-grpo), entity, group (default: the sweep), tags, others. "
            "mode: offline, disabled, or auto (the default): online with WANDB_API_KEY or after `wandb login`, "
            "else off."
        ),
    )
    tensorboard: bool = Field(False, description="Write TensorBoard event files.")
    completions: NonNegativeInt = Field(
        0,
        description=(
            "Largest number of completions of a step in a table of W&B and TensorBoard, from the completions that "
            "rollout.logged_fraction keeps. 0: no text leaves the run directory."
        ),
    )
    names: Literal["ours", "areal", "areal-0.3"] = Field(
        "ours",
        description="Naming scheme of the metrics in W&B, TensorBoard and the log. metrics.jsonl always has ours.",
    )
    profile_steps: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="[a, b]: write torch traces and Python stacks of steps a to b to profiles. First step: 1."
    )

    @field_validator("wandb")
    @classmethod
    def _are_not_ours(cls, args: WandbArgs) -> WandbArgs:
        if taken := [name for name in args if name in _OF_THE_RUN]:
            raise ValueError(f"{taken[0]} is set by hpc-grpo: remove it here")
        return args

    @field_validator("profile_steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and steps[0] > steps[1]:
            raise ValueError(f"the first step must come first: [{steps[1]}, {steps[0]}]")
        return steps
