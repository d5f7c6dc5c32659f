"""Read what a run has measured of itself: how long its completions are, and what sampling and training them takes.

Consumes the rollouts, and the steps of the newest attempt that has some. Seconds of sampling are not in its metrics as
such. Without a policy lag they are those that the driver waited; with one, engines sample while learners train, and
`forecast.measured_rates` finds what they take.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics, read_state
from hpc_grpo.simulate.lengths import EXPONENTIAL, Sequences
from hpc_grpo.system.readable import counted

_FEWEST_STEPS = 3
_MOST_FILES = 20
_WAIT, _TRAIN, _PUBLISH, _STEP = (f"time/{phase}_s" for phase in ("generate_wait", "train", "publish", "step"))
_LEFT_OUT = "tokens/left_out_fraction"


@dataclass(frozen=True)
class MeasuredStep:
    """One step's seconds and tokens, `trained_tokens` those that learners computed.

    `wait_s` is what the driver waited for rollouts; without a lag also over the save of the step before, as engines
    sample then. `between_s` is the rest beside training and publishing: evals, records, saves that learners wait for.
    """

    num_tokens: float
    num_rollouts: int
    trained_tokens: float
    wait_s: float
    train_s: float
    publish_s: float
    between_s: float
    alike_share: float


@dataclass(frozen=True)
class Measurements:
    """Hold what one attempt has measured."""

    steps: tuple[MeasuredStep, ...]
    sequences: Sequences
    num_nodes: int
    measured_s: float
    steps_to_go: int
    which_steps: str

    @property
    def steps_per_h(self) -> float:
        return 3600 * len(self.steps) / self.measured_s


def read_measurements(run: RunDir, config: Config) -> Measurements:
    """Read a run. Raises ConfigError where it samples nothing, or has taken too few steps."""
    if not config.needs.rollouts:
        raise ConfigError(f"task = {config.task.name} samples nothing: there is nothing to divide between engines.")
    every = read_metrics(run.metrics)
    attempts = Counter(line["attempt"] for step, line in every.items() if step > 0)
    attempt = max((number for number, count in attempts.items() if count >= _FEWEST_STEPS), default=None)
    if attempt is None:
        raise ConfigError(
            f"{run.path} has no attempt of {_FEWEST_STEPS} steps or more to learn from: its "
            f"{counted(len(attempts), 'attempt')} took {sum(attempts.values())}. Train a little longer, or see what "
            f"`hpc-grpo plan` expects."
        )
    lines = [line for step, line in every.items() if step > 0 and line["attempt"] == attempt]
    nodes = {record.attempt: len(record.nodes) for record in read_attempts(run)}
    state = read_state(run)
    total = state.total_steps if state else max(every)
    to_go = total - max(every)
    return Measurements(
        steps=measured_steps(lines, config),
        sequences=Sequences(
            lengths=_relative_lengths(run),
            prompt_tokens=round(statistics.mean(line.get("tokens/prompt_mean", 0.0) for line in lines)),
            leaves_out=any(_LEFT_OUT in line for line in lines),
        ),
        num_nodes=nodes.get(attempt, config.launch.num_nodes),
        measured_s=sum(line[_STEP] for line in lines),
        steps_to_go=to_go or total,
        which_steps="those to the end" if to_go else "the whole run, which is complete",
    )


def measured_steps(lines: Sequence[Mapping[str, Any]], config: Config) -> tuple[MeasuredStep, ...]:
    """Take the lines of one attempt's steps apart, in their order."""
    return tuple(
        MeasuredStep(
            num_tokens=line["tokens/completion_total"],
            num_rollouts=round(_sampled_groups(line, config) * config.rollout.group_size),
            trained_tokens=line["tokens/completion_total"] * _trained_share(line, config),
            wait_s=wait_s,
            train_s=line[_TRAIN],
            publish_s=line[_PUBLISH],
            between_s=max(line[_STEP] - wait_s - line[_TRAIN] - line[_PUBLISH], 0.0),
            alike_share=line.get("reward/zero_variance_fraction", 0.0),
        )
        for line in lines
        for wait_s in [line[_WAIT] + (0.0 if config.rollout.max_policy_lag else line.get("time/checkpoint_s", 0.0))]
    )


def _sampled_groups(line: Mapping[str, Any], config: Config) -> float:
    return float(line.get("groups/sampled", config.rollout.prompts_per_step))


def _trained_share(line: Mapping[str, Any], config: Config) -> float:
    """Return the share of the sampled tokens that went through the learners."""
    alike = line.get("reward/zero_variance_fraction", 0.0)
    if config.rollout.dynamic_sampling:
        return float(line["groups/trained"] / line["groups/sampled"])
    left_out = alike if config.rollout.drop_zero_variance else line.get(_LEFT_OUT, 0.0)
    return max(1.0 - float(left_out), 0.0)


def _relative_lengths(run: RunDir) -> tuple[float, ...]:
    """Return lengths in shares of their step's mean: tokens where rollouts tell them, else characters.

    Rollouts of training first, else those of evals; without any, an exponential distribution's.
    """
    folder = run.rollouts(0).parent
    for pattern in ("step_*.jsonl", "eval_step_*.jsonl"):
        found: list[float] = []
        for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)[-_MOST_FILES:]:
            own = [line.get("tokens") or len(line.get("completion", "")) + 1 for line in read_jsonl(path)]
            found += [length * len(own) / sum(own) for length in own]
        if found:
            return tuple(found)
    return EXPONENTIAL
