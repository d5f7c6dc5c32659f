"""Sections `run`, `checkpoint`, `deadlines`, `eval`, `metrics`: where a run lives, what it saves, how it is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from hpc_grpo.section import LocalPath, PathText, Section, TopP


class Every(NamedTuple):
    """How often something recurs: whichever comes first; with none of them, never."""

    steps: int | None
    epochs: int | None
    seconds: float | None

    @property
    def is_ever(self) -> bool:
        return any(each is not None for each in self)

    @property
    def known_steps(self) -> int | None:
        """Return the steps between two times; None where epochs or seconds have a say, whose steps nobody knows yet."""
        return self.steps if self.epochs is None and self.seconds is None else None


class RunConfig(Section):
    name: str = Field(description="Name of the run; its folder below `root`.")
    root: Annotated[Path, LocalPath] = Field(
        Path("runs"), description="Folder that holds the run directories, made absolute; see launch.disks."
    )
    seed: NonNegativeInt = Field(0, description="Decides the shuffle, the sampling and the initial RNG state.")

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: Path) -> Path:
        return root.absolute()


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = Field(
        50, description="Also after the first step and at the end; null in all three: only then."
    )
    every_epochs: PositiveInt | None = Field(None, description="Passes over the data between checkpoints.")
    every_s: PositiveFloat | None = Field(None, description="Seconds between checkpoints, in each job anew.")
    behind_training: bool = Field(
        True,
        description="Copy a checkpoint to host memory, which holds it from then on, and write it while training goes "
        "on; false: training waits for the disk.",
    )
    keep_last: PositiveInt = Field(2, description="Older checkpoints are removed.")
    keep_batches: NonNegativeInt = Field(
        0, description="Newest steps whose batches are kept, some 20 bytes a token, for `hpc-grpo replay`; 0: none."
    )
    export_every_steps: PositiveInt | None = Field(
        None, description="Hugging Face export; null in all three: at the end."
    )
    export_every_epochs: PositiveInt | None = Field(None, description="Passes over the data between exports.")
    export_every_s: PositiveFloat | None = Field(None, description="Seconds between exports, in each job anew.")
    keep_exports: PositiveInt | None = Field(
        None, description="Older exports are removed, never the newest or the final one; null: all stay."
    )

    @property
    def every(self) -> Every:
        return Every(self.every_steps, self.every_epochs, self.every_s)

    @property
    def export_every(self) -> Every:
        return Every(self.export_every_steps, self.export_every_epochs, self.export_every_s)


class DeadlinesConfig(Section):
    """When to give up on a process: before its longest time is known, and after that."""

    start_s: PositiveFloat = Field(
        1800.0,
        description="Start of the driver and of each actor, and an actor's first work. A checkpoint may take 2 times "
        "as long, a step's rollouts or training 4 times, a resume or an eval 8 times.",
    )
    silent_s: PositiveFloat = Field(
        60.0,
        description="A learner, engine or grader is late after 10 times its longest pause in this run, but no sooner "
        "than this; the driver no sooner than 5 times this.",
    )


class EvalConfig(Section):
    every_steps: PositiveInt | None = Field(
        None, description="null in all three: no eval. Else also at step 0 and at the end."
    )
    every_epochs: PositiveInt | None = Field(None, description="Passes over the data between evals.")
    every_s: PositiveFloat | None = Field(None, description="Seconds between evals, in each job anew.")
    num_samples: PositiveInt = Field(1, description="Completions per prompt, n of pass@k.")
    pass_k: list[PositiveInt] = Field(default_factory=lambda: [1], description="Values of k; at most num_samples.")
    temperature: NonNegativeFloat = Field(1.0, description="0: greedy.")
    top_p: TopP | None = Field(None, description="Nucleus sampling threshold; null: rollout.top_p.")
    reward: PathText = Field(
        "correctness",
        description="The reward that decides what counts as solved; of a source with other rewards: its first.",
    )
    solved_at: float = Field(1.0, description="A completion with at least this reward is solved.")
    metrics: list[PathText] = Field(
        default_factory=list, description="Functions of yours that make metrics of what was graded: module:function."
    )

    @property
    def every(self) -> Every:
        return Every(self.every_steps, self.every_epochs, self.every_s)

    @property
    def functions(self) -> dict[str, str]:
        """Return the keys that name a function of the user's, and its name."""
        return {f"eval.metrics.{position}": name for position, name in enumerate(self.metrics)}


class MetricsConfig(Section):
    wandb_project: str = Field("hpc-grpo", description="Project of the W&B run.")
    wandb_entity: str | None = Field(None, description="W&B team; null: your default.")
    wandb_mode: Literal["auto", "offline", "disabled"] = Field(
        "auto", description="auto: online if WANDB_API_KEY is set or after `wandb login`, else off."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard event files.")
    names: Literal["ours", "areal", "areal-0.3"] = Field(
        "ours", description="Whose names W&B, TensorBoard and the log give the metrics; metrics.jsonl has ours."
    )
    profile_steps: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="[a, b]: torch traces and Python stacks of steps a to b, counted from 1, in profiles."
    )

    @field_validator("profile_steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and steps[0] > steps[1]:
            raise ValueError(f"the first step comes before the last: [{steps[1]}, {steps[0]}]")
        return steps
