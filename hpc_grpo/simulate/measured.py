"""A run's own measurements: the lengths of its completions, and the time of sampling and training them.

The metrics of a run do not have the seconds of sampling. Without a policy lag, the driver's wait is the sampling time.
With a lag, engines sample several steps while learners train, and no metric has the sampling time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.driver.schedule import train_length
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics, read_state
from hpc_grpo.simulate.cluster import FEWEST_STEPS, Setting, SimulatedEngine, SimulatedRun
from hpc_grpo.simulate.rates import EXPONENTIAL, DrawnStep, Rate, Rates, Sequences, draw_lengths, scale_of
from hpc_grpo.system.readable import counted

_FEWEST_STEPS = 3
_MOST_FILES = 20
_DRAWN_ROLLOUTS = 2000
_CALIBRATED_ROLLOUTS, _CALIBRATIONS = 10_000, 3
"""Number of rollouts, and of draws, for fitting the rates of a run with a lag."""
_SHORTEST_S = 1e-6
_LESS = 0.8
"""The second number of a fit must reduce the squared errors below this share."""
_WAIT, _TRAIN, _PUBLISH, _STEP = (f"time/{phase}_s" for phase in ("generate_wait", "train", "publish", "step"))
_LEFT_OUT = "tokens/left_out_fraction"


@dataclass(frozen=True)
class MeasuredAttempt:
    """The steps of one attempt, from its lines of metrics.jsonl.

    `num_nodes` is None if the attempt's record is missing.
    """

    number: int
    lines: tuple[Mapping[str, Any], ...]
    num_nodes: int | None
    last_step: int
    total_steps: int | None

    @property
    def median_step_s(self) -> float:
        return float(statistics.median(line[_STEP] for line in self.lines))

    @property
    def num_remaining_steps(self) -> int | None:
        """The steps to the end of the run; None if the length of the run is not known."""
        return None if self.total_steps is None else max(0, self.total_steps - self.last_step)


def newest_attempt(run: RunDir, config: Config, fewest_steps: int = 1) -> MeasuredAttempt | None:
    """Return the newest attempt with at least this many steps; None if there is none."""
    steps = read_metrics(run.metrics).items()
    lines = [line for step, line in steps if step > 0 and math.isfinite(line.get(_STEP, math.nan))]
    numbers = [int(line["attempt"]) for line in lines]
    enough = [number for number, count in Counter(numbers).items() if count >= fewest_steps]
    if not enough:
        return None
    state, number = read_state(run), max(enough)
    is_known = config.train.total_epochs is None
    return MeasuredAttempt(
        number,
        tuple(line for line, of in zip(lines, numbers, strict=True) if of == number),
        {record.attempt: len(record.nodes) for record in read_attempts(run)}.get(number),
        last_step=max(int(line["step"]) for line in lines),
        total_steps=train_length(config, 1).total_steps if is_known else state.total_steps if state else None,
    )


@dataclass(frozen=True)
class MeasuredStep:
    """The seconds and tokens of one step. `trained_tokens` are the tokens that learners computed.

    `wait_s` is the driver's wait for rollouts. Without a lag it includes the save of the previous step, because engines
    sample during it. `between_s` is all other time besides training and publishing: evals, records, saves that block
    learners.
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
    """The steps of one attempt, and the rest of the run."""

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
    """Return a run's measurements. Raises ConfigError if the run samples nothing, or has too few steps."""
    if not config.needs.rollouts:
        raise ConfigError(f"task = {config.task.name} samples nothing: there is nothing to divide between engines.")
    attempt = newest_attempt(run, config, _FEWEST_STEPS)
    if attempt is None:
        numbers = [line["attempt"] for step, line in read_metrics(run.metrics).items() if step > 0]
        raise ConfigError(
            f"{run.path} has no attempt of {_FEWEST_STEPS} steps or more to learn from: its "
            f"{counted(len(set(numbers)), 'attempt')} took {len(numbers)} steps. Train longer, or see what "
            f"`hpc-grpo plan CONFIG` expects."
        )
    lines, to_go = attempt.lines, attempt.num_remaining_steps
    return Measurements(
        steps=measured_steps(lines, config),
        sequences=Sequences(
            lengths=_relative_lengths(run),
            prompt_tokens=round(_mean(lines, "tokens/prompt_mean", 0.0)),
            leaves_out=any(_LEFT_OUT in line for line in lines),
            turns=(turns := _mean(lines, "episode/turns", 1.0)),
            environment_s=_mean(lines, "episode/env_s", 0.0) / turns,
        ),
        num_nodes=attempt.num_nodes or config.launch.num_nodes,
        measured_s=sum(line[_STEP] for line in lines),
        steps_to_go=to_go or attempt.total_steps or attempt.last_step,
        which_steps="those to the end" if to_go else "the whole run, which is complete",
    )


def measured_steps(lines: Sequence[Mapping[str, Any]], config: Config) -> tuple[MeasuredStep, ...]:
    """Split the lines of one attempt into steps, in order."""
    return tuple(
        MeasuredStep(
            num_tokens=line["tokens/completion_total"],
            num_rollouts=round(line.get("groups/sampled", config.rollout.prompts_per_step) * config.rollout.group_size),
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


def _mean(lines: Sequence[Mapping[str, Any]], name: str, otherwise: float) -> float:
    return statistics.fmean(line.get(name, otherwise) for line in lines)


def _trained_share(line: Mapping[str, Any], config: Config) -> float:
    """Return the share of the sampled tokens that learners computed."""
    alike = line.get("reward/zero_variance_fraction", 0.0)
    if config.rollout.dynamic_sampling:
        return float(line["groups/trained"] / line["groups/sampled"])
    left_out = alike if config.rollout.drop_zero_variance else line.get(_LEFT_OUT, 0.0)
    return max(1.0 - float(left_out), 0.0)


def _relative_lengths(run: RunDir) -> tuple[float, ...]:
    """Return lengths relative to their step's mean: in tokens if rollouts have them, else in characters.

    Uses rollouts of training, else those of evals. Without any, uses an exponential distribution.
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


def measured_rates(measured: Measurements, config: Config) -> Rates:
    """Fit the rates of a run.

    With a lag or an environment, choose the decode step's time so that the simulated run waits as long as the run did.
    """
    rates, rollout = fit_rates(measured, config), config.rollout
    if _waits_to_sample(measured, config):
        return rates
    learners, engines = config.placement.learners_per_node, config.engine.engines_per_node
    setting = Setting(measured.num_nodes, learners, engines, rollout.max_policy_lag)
    most = max(FEWEST_STEPS, _CALIBRATED_ROLLOUTS // (rollout.prompts_per_step * rollout.group_size))
    waited_s = max(sum(step.wait_s for step in measured.steps[:most]), _SHORTEST_S)

    def waits_longer(decode_s: float) -> bool:
        tried = replace(rates, decoding=Rate(decode_s, 0.0), draws=rates.draws[:most])
        runs = [SimulatedRun(config, tried, setting, seed) for seed in range(_CALIBRATIONS)]
        for run in runs:
            run.take_steps(len(tried.draws))
        return statistics.fmean(run.waited_s for run in runs) > waited_s

    low = high = max(rates.decoding.fixed_s, _SHORTEST_S)
    while low > _SHORTEST_S and waits_longer(low):  # environments alone may take longer than the run waited
        low /= 2
    while not waits_longer(high):
        high *= 2
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if waits_longer(middle) else (middle, high)
    return replace(rates, decoding=Rate(low, 0.0))


def _waits_to_sample(measured: Measurements, config: Config) -> bool:
    """Return whether the driver waited only for sampling."""
    return config.rollout.max_policy_lag == 0 and not measured.sequences.environment_s


def fit_rates(measured: Measurements, config: Config) -> Rates:
    """Fit both rates to a run's steps.

    With a lag or an environment, `decoding` is only a first guess, from the first step's wait.

    If the steps are too similar to fit two numbers, `plan`'s assumptions hold: a decode step costs the same for any
    batch (it reads the weights), and training costs the same for each token (it computes).
    """
    engines = measured.num_nodes * config.engine.engines_per_node
    learners = measured.num_nodes * config.placement.learners_per_node
    steps, lengths, longest = measured.steps, measured.sequences.lengths, config.most_sampled
    scales = [scale_of(lengths, step.num_tokens / step.num_rollouts, longest) for step in steps]
    counts = [_decode_steps(lengths, config, scale, engines) for scale in scales]
    sampled = [step.num_tokens / engines for step in steps]
    waits_s = [step.wait_s for step in steps]
    is_alone = _waits_to_sample(measured, config)
    decoding = fit(counts, sampled, waits_s, by_part=False) if is_alone else Rate(waits_s[0] / counts[0], 0.0)
    trained = [step.trained_tokens / learners for step in steps]
    training = fit([1.0] * len(trained), trained, [step.train_s for step in steps], by_part=True)
    draws = tuple(
        DrawnStep(
            scale=scale,
            sampling_factor=step.wait_s / (decoding.fixed_s * count + decoding.part_s * own) if is_alone else 1.0,
            training_factor=step.train_s / training(of_learner) if training(of_learner) else 1.0,
            publish_s=step.publish_s,
            between_s=step.between_s,
            alike_share=step.alike_share,
        )
        for step, scale, count, own, of_learner in zip(steps, scales, counts, sampled, trained, strict=True)
    )
    return Rates(decoding, training, draws, measured.sequences)


def fit(counts: Sequence[float], parts: Sequence[float], seconds: Sequence[float], *, by_part: bool) -> Rate:
    """Fit seconds = fixed_s counts + part_s parts by least squares, neither below 0.

    Uses both numbers only if they reduce the squared error of a single number by more than a fifth. The single number
    is part_s if `by_part`, unless all parts are 0, else fixed_s.

    >>> fit([1.0, 1.0, 1.0], [10.0, 20.0, 30.0], [3.0, 5.0, 7.0], by_part=True)
    Rate(fixed_s=1.0, part_s=0.2)
    >>> fit([1.0, 1.0], [10.0, 10.0], [3.0, 5.0], by_part=True)
    Rate(fixed_s=0.0, part_s=0.4)
    """
    cc, pp, cp = _dot(counts, counts), _dot(parts, parts), _dot(counts, parts)
    cs, ps = _dot(counts, seconds), _dot(parts, seconds)
    alone = Rate(0.0, ps / pp) if by_part and pp else Rate(cs / cc, 0.0)
    determinant = cc * pp - cp * cp
    if determinant <= 1e-9 * cc * pp:
        return alone
    both = Rate((cs * pp - ps * cp) / determinant, (cc * ps - cp * cs) / determinant)
    if min(both.fixed_s, both.part_s) < 0.0:
        return alone

    def squared_errors(rate: Rate) -> float:
        rows = zip(counts, parts, seconds, strict=True)
        return sum((rate.fixed_s * count + rate.part_s * part - own) ** 2 for count, part, own in rows)

    return both if squared_errors(both) < _LESS * squared_errors(alone) else alone


def _decode_steps(shares: Sequence[float], config: Config, scale: float, engines: int) -> float:
    """Return the decode steps until the last engine has its share of a training step, averaged over draws."""
    groups, size, longest = config.rollout.prompts_per_step, config.rollout.group_size, config.most_sampled
    ends = []
    for seed in range(max(5, _DRAWN_ROLLOUTS // (groups * size))):
        drawing, last = random.Random(seed), 0.0
        for index in range(min(engines, groups)):
            engine = SimulatedEngine(Rate(1.0, 0.0), config.engine.max_num_seqs)
            count = len(range(index, groups, engines)) * size
            lengths = draw_lengths(shares, scale, longest, count, drawing)
            last = max(last, engine.end_of(engine.submit([[(length, 0.0)] for length in lengths], 0.0)))
        ends.append(last)
    return statistics.fmean(ends)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
