"""Simulate a run: the driver's loop, batches and scheduler, with simulated engines and learners.

Nothing is sampled or trained, so a day passes in seconds. Omits the network between nodes (gradients, publishing to
another number of nodes), failures, and processes that slow each other down on shared cores.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hpc_grpo.config import Config
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.batches import Batch, RolloutBatches, TrainItem, balanced
from hpc_grpo.driver.loop import TrainingLoop
from hpc_grpo.driver.rollouts import DriverState, GradedGroup, RolloutScheduler, spread
from hpc_grpo.metrics.record import StepTimer
from hpc_grpo.simulate.rates import DrawnStep, Rates, draw_lengths
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt, RemoteGroup

FEWEST_STEPS = 30
_MOST_STEPS, _MOST_ROLLOUTS = 300, 300_000


@dataclass(frozen=True)
class Setting:
    """Nodes and a split to simulate. `learners` and `engines` are per node, `width` is the GPUs of one engine."""

    nodes: int
    learners: int
    engines: int
    lag: int
    width: int = 1


@dataclass(frozen=True)
class Forecast:
    """The speed of a run. An idle share is the share of time in which engines or learners do nothing."""

    setting: Setting
    steps_per_h: float
    engines_idle: float
    learners_idle: float

    @property
    def step_s(self) -> float:
        return 3600 / self.steps_per_h

    def node_hours(self, num_steps: int) -> float:
        return num_steps / self.steps_per_h * self.setting.nodes


def forecast(config: Config, rates: Rates, setting: Setting, num_steps: int | None = None, edge: int = 0) -> Forecast:
    """Simulate a run of `config` at `setting`. Repeated calls return the same numbers.

    The default of `num_steps` is enough for a mean. `edge` steps before and after are simulated but not counted: with a
    lag the first steps fill the pipeline, and the last steps have nothing to sample ahead.
    """
    if num_steps is None:
        per_step = config.rollout.prompts_per_step * config.rollout.group_size
        num_steps = min(_MOST_STEPS, max(FEWEST_STEPS, _MOST_ROLLOUTS // per_step))
    run = SimulatedRun(config, rates, setting)
    spent = [run.spent()]
    run.take_steps(num_steps + 2 * edge, lambda: spent.append(run.spent()))
    elapsed_s, sampled_s, trained_s = (
        end - begin for begin, end in zip(spent[edge], spent[edge + num_steps], strict=True)
    )
    return Forecast(
        setting,
        steps_per_h=3600 * num_steps / elapsed_s,
        # At least 0: both are sums of many rounded numbers.
        engines_idle=max(0.0, 1 - sampled_s / (elapsed_s * len(run.engines))),
        learners_idle=max(0.0, 1 - trained_s / (elapsed_s * setting.nodes * setting.learners)),
    )


@dataclass
class Call:
    """One group in an engine. It ends with its last rollout."""

    num_left: int
    ended_at: float = 0.0


@dataclass
class Wave:
    """Rollouts whose next turns begin together, after the last of their environments has answered."""

    num_open: int = 0
    ready: list[tuple[int, float, _Rollout]] = field(default_factory=list)


@dataclass
class _Rollout:
    call: Call
    turns: Iterator[tuple[int, float]]
    wave: Wave | None


class SimulatedEngine:
    """Samples like vLLM: turns in order of arrival, `max_num_seqs` at once, one token each per decode step.

    The engine has its own clock. It shows at least the time of the last call; `end_of` may advance it further.
    """

    def __init__(self, decoding: Callable[[float], float], max_num_seqs: int) -> None:
        self._decoding, self._max_num_seqs = decoding, max_num_seqs
        self._factor = 1.0
        self._time = self._steps = self.busy_s = 0.0
        self._order = itertools.count()
        self._running: list[tuple[float, int, float, _Rollout]] = []
        """For each turn: its last decode step, a tie breaker, the environment's seconds after it, its rollout."""
        self._thinking: list[tuple[float, int, _Rollout]] = []
        """For each environment: the time of its answer, a tie breaker, its rollout."""
        self._waiting: deque[tuple[int, float, _Rollout]] = deque()
        self._num_open = 0

    def load(self, now: float) -> int:
        """Count the groups that have not ended at the time `now`."""
        self.advance(now)
        return self._num_open

    def submit(
        self, rollouts: Sequence[Sequence[tuple[int, float]]], now: float, factor: float = 1.0, wave: Wave | None = None
    ) -> Call:
        """Queue rollouts: the tokens of each turn, and the environment's seconds after it.

        `factor` multiplies the seconds of all later sampling.
        """
        self.advance(now)
        self._factor = factor
        call = Call(len(rollouts), now)
        self._num_open += 1
        if wave is not None:
            wave.num_open += len(rollouts)
        for turns in rollouts:
            (tokens, seconds), *others = turns
            self._waiting.append((tokens, seconds, _Rollout(call, iter(others), wave)))
        self._admit()
        return call

    def end_of(self, call: Call) -> float:
        """Sample until `call` has ended; return when that was."""
        while call.num_left:
            self._take_next()
        return call.ended_at

    def advance(self, until: float) -> None:
        """Sample the queued turns until a time."""
        while self._take_next(until):
            pass
        self._move(until)

    def _take_next(self, until: float = math.inf) -> bool:
        """Advance to the next end of a turn or answer of an environment. Return False if none comes by `until`."""
        answers_at = self._thinking[0][0] if self._thinking else math.inf
        ends_at = math.inf
        if self._running:
            ends_at = self._time + (self._running[0][0] - self._steps) * self._step_s()
        if min(answers_at, ends_at) > until or answers_at == ends_at == math.inf:
            return False
        if answers_at < ends_at:
            self._move(answers_at)
            self._go_on(heapq.heappop(self._thinking)[-1])
        else:
            self._move(ends_at)
            self._steps, _, seconds, rollout = heapq.heappop(self._running)
            if seconds:
                heapq.heappush(self._thinking, (self._time + seconds, next(self._order), rollout))
            else:
                self._go_on(rollout)
        self._admit()
        return True

    def _move(self, until: float) -> None:
        if self._running and until > self._time:
            self._steps += (until - self._time) / self._step_s()
            self.busy_s += until - self._time
        self._time = max(self._time, until)

    def _go_on(self, rollout: _Rollout) -> None:
        """Queue the next turn of a rollout, or end it."""
        call, wave = rollout.call, rollout.wave
        if (turn := next(rollout.turns, None)) is not None:
            (self._waiting if wave is None else wave.ready).append((*turn, rollout))
        else:
            call.num_left -= 1
            call.ended_at = self._time
            self._num_open -= not call.num_left
            if wave is not None:
                wave.num_open -= 1
        if wave is not None and len(wave.ready) == wave.num_open:
            self._waiting.extend(wave.ready)
            wave.ready.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            tokens, seconds, rollout = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + tokens, next(self._order), seconds, rollout))

    def _step_s(self) -> float:
        return self._factor * self._decoding(len(self._running))


@dataclass(frozen=True)
class _Started:
    prompt: Prompt
    call: Call
    engine: SimulatedEngine
    grades: GroupGrades


class SimulatedRun:
    """The simulated parts of the driver's loop. `now` is the driver's clock; each wait of the driver advances it."""

    def __init__(self, config: Config, rates: Rates, setting: Setting, seed: int = 0) -> None:
        # Without the parts that need real data: the curriculum and texts.
        rollout = config.rollout.model_copy(update={"max_policy_lag": setting.lag, "logged_fraction": 0.0})
        data = config.data.model_copy(update={"curriculum": None})
        self.config = config.model_copy(update={"rollout": rollout, "data": data})
        self.rates, self.setting = rates, setting
        self.now = self.waited_s = self._trained_s = 0.0
        self.engines = [
            SimulatedEngine(rates.decoding, config.engine.max_num_seqs) for _ in range(setting.nodes * setting.engines)
        ]
        self.timer = StepTimer(lambda: self.now)
        self._longest, self._drawing = config.most_sampled, random.Random(seed)
        self._draws: list[DrawnStep] = []
        self._num_calls = self._num_trained = self._version = 0

    def take_steps(self, num_steps: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Run the driver's loop for `num_steps`. Calls `on_step` when the driver would record a step."""
        self._num_steps, self._on_step = num_steps, on_step
        state = DriverState()
        scheduler = RolloutScheduler(self.config, cast(PromptStream, self), self, state, num_steps)
        TrainingLoop(self, RolloutBatches(self.config, scheduler), self, self).run(state)

    def spent(self) -> tuple[float, float, float]:
        """Return the time so far, and the sums of the engines' sampling seconds and the learners' training seconds."""
        for engine in self.engines:
            engine.advance(self.now)
        return self.now, sum(engine.busy_s for engine in self.engines), self._trained_s

    def _draw(self, step: int) -> DrawnStep:
        """Return the measured step that stands for `step`. All come once in random order before one comes again."""
        while len(self._draws) <= step:
            self._draws += self._drawing.sample(self.rates.draws, len(self.rates.draws))
        return self._draws[step]

    # The session: continues to the last step, and records nothing.
    step_p95_s = None

    def should_go_on(self, state: DriverState, *, evaluates: bool) -> bool:
        return state.step < self._num_steps

    def record_step(self, state: DriverState, metrics: Mapping[str, float], batch: Batch) -> None:
        self.timer.finish_step()
        self._on_step()

    def ends_after(self, step: int, metrics: Mapping[str, float]) -> bool:
        return False

    def lacks_eval(self, step: int) -> bool:
        return False

    def batch_record(self, step: int) -> None:
        return None

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def save_if_due(self, state: DriverState) -> None: ...

    def save_before_ending(self, state: DriverState, record: Callable[[], None] | None) -> None: ...

    # The prompts, of the run's mean length.
    num_items = 2**62

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, 0, (0,) * max(self.rates.sequences.prompt_tokens, 1), "", {})

    # The pool of engines; groups are dealt out as in the driver.
    def restarts(self) -> dict[str, float]:
        return {}

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]
    ) -> list[_Started]:
        draw = self._draw(self._num_calls)
        self._num_calls += 1
        grades = [self._grades(prompt.ordinal, draw) for prompt in prompts]
        chosen = spread(len(prompts), [engine.load(self.now) for engine in self.engines])
        waves = defaultdict[int, Wave](Wave)
        started = []
        for prompt, at, own in zip(prompts, chosen, grades, strict=True):
            turns = [self.rates.sequences.turns_of(length, self._drawing) for length in own.num_completion_tokens]
            wave = waves[at] if self.rates.sequences.are_episodes and not self.setting.lag else None
            call = self.engines[at].submit(turns, self.now, draw.sampling_factor, wave)
            started.append(_Started(prompt, call, self.engines[at], own))
        return started

    def wait(self, started: Sequence[_Started], waiting_for: str) -> list[GradedGroup]:
        begun, self.now = self.now, max(self.now, *(group.engine.end_of(group.call) for group in started))
        self.waited_s += self.now - begun
        return [GradedGroup(group.prompt, None, group.grades) for group in started]

    def _grades(self, ordinal: int, draw: DrawnStep) -> GroupGrades:
        size, longest = self.config.rollout.group_size, self._longest
        lengths = draw_lengths(self.rates.sequences.lengths, draw.scale, longest, size, self._drawing)
        is_alike = self._drawing.random() < draw.alike_share
        return GroupGrades(
            ordinal=ordinal,
            rewards=tuple(0.0 if is_alike else float(index % 2) for index in range(size)),
            reward_parts={},
            valid=(True,) * size,
            num_completion_tokens=tuple(lengths),
            truncated=tuple(length == longest for length in lengths),
            min_policy_versions=(self._version,) * size,
            mean_policy_versions=(float(self._version),) * size,
            num_prompt_tokens=max(self.rates.sequences.prompt_tokens, 1),
        )

    # The learners: a step takes as long as the fullest of them.
    def train(self, batch: Batch, record: Path | None) -> dict[str, float]:
        count, training = self.setting.nodes * self.setting.learners, self.rates.training
        tokens, fullest = [0.0] * count, 0.0
        for minibatch in batch.minibatches:
            parts = balanced(minibatch, [item.cost for item in minibatch], count)
            own = [sum(map(self._computed_tokens, part)) for part in parts]
            tokens = [total + more for total, more in zip(tokens, own, strict=True)]
            fullest += max(own)
        factor = self._draw(self._num_trained).training_factor
        self._num_trained += 1
        self.now += factor * training(fullest)
        self._trained_s += factor * sum(map(training, tokens))
        return {}

    def _computed_tokens(self, item: TrainItem) -> int:
        is_alike = isinstance(item.data, RemoteGroup) and not any(item.data.advantages)
        return 0 if is_alike and self.rates.sequences.leaves_out else item.num_trained_tokens

    # The weights. The run's evals, checkpoints and records take their time here, after the publish.
    def publish(self, version: int) -> dict[str, float]:
        if self._num_trained:
            draw = self._draw(self._num_trained - 1)
            self.now += draw.publish_s + draw.between_s
        self._version = version
        return {}

    def put_engines_to_sleep(self) -> None:
        """Cost nothing: this time is part of the measured steps."""
