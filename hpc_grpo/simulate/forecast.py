"""Run the driver's own loop, batches and scheduler against simulated engines and learners, and see how long it takes.

Not simulated: the network between nodes (gradients, the publish of another number of nodes), failures, and that one
process slows another down on the same cores.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hpc_grpo.config import Config
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.batches import Batch, RolloutBatches
from hpc_grpo.driver.engines import RolloutPool
from hpc_grpo.driver.journal import Session
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.loop import TrainingLoop
from hpc_grpo.driver.rollouts import DriverState, RolloutScheduler
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.simulate.cluster import (
    Setting,
    SimulatedCluster,
    SimulatedLearners,
    SimulatedPool,
    SimulatedStream,
    SimulatedWeights,
)
from hpc_grpo.simulate.lengths import Sequences
from hpc_grpo.simulate.measured import Measurements
from hpc_grpo.simulate.rates import Rate, Rates, fit_rates

if TYPE_CHECKING:
    from hpc_grpo.driver.weights import WeightSync

_MOST_STEPS, _FEWEST_STEPS, _MOST_ROLLOUTS = 300, 30, 300_000
"""A simulation takes so many steps, fewer where a step has many rollouts."""
_CALIBRATED_ROLLOUTS, _CALIBRATIONS = 10_000, 3
"""The rates of a run with a lag are found over so many of its rollouts, drawn so many times."""
_SHORTEST_S = 1e-6


@dataclass(frozen=True)
class Forecast:
    """Hold what becomes of a run there. Idle: the share of time in which engines sample, learners train nothing."""

    setting: Setting
    steps_per_h: float
    engines_idle: float
    learners_idle: float

    @property
    def step_s(self) -> float:
        return 3600 / self.steps_per_h

    def node_hours(self, num_steps: int) -> float:
        return num_steps / self.steps_per_h * self.setting.nodes


def forecast(config: Config, sequences: Sequences, rates: Rates, setting: Setting) -> Forecast:
    """Simulate a run of `config` at `setting`, from a first step to a last; the same numbers each time."""
    per_step = config.rollout.prompts_per_step * config.rollout.group_size
    num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _MOST_ROLLOUTS // per_step))
    return forecast_amid(config, sequences, rates, setting, num_steps, edge=0)


def forecast_amid(
    config: Config, sequences: Sequences, rates: Rates, setting: Setting, num_steps: int, edge: int
) -> Forecast:
    """Do the same, but count only `num_steps` amid the run: not the `edge` before, nor as many after them.

    With a lag the first steps of a run fill the pipeline, and its last ones have nothing to sample ahead.
    """
    cluster = SimulatedCluster(_config_at(config, setting), sequences, rates, setting)
    spent = [cluster.spent()]
    run_steps(cluster, num_steps + 2 * edge, lambda: spent.append(cluster.spent()))
    pairs = zip(spent[edge], spent[edge + num_steps], strict=True)
    elapsed_s, sampled_s, trained_s = (end - begin for begin, end in pairs)
    return Forecast(
        setting,
        steps_per_h=3600 * num_steps / elapsed_s,
        engines_idle=_idle(sampled_s, elapsed_s * len(cluster.engines)),
        learners_idle=_idle(trained_s, elapsed_s * setting.nodes * setting.learners),
    )


def _idle(spent_s: float, of_s: float) -> float:
    return max(0.0, 1 - spent_s / of_s)  # a sum of many rounded numbers


def measured_rates(measured: Measurements, config: Config) -> Rates:
    """Fit the rates of a run. With a lag, a decode step takes as long as makes the simulated run wait as the run did.

    Its engines sample while learners train, several steps at a time, so no line tells what they take.
    """
    rates, rollout = fit_rates(measured, config), config.rollout
    if not rollout.max_policy_lag:
        return rates
    learners, engines = config.placement.learners_per_node, config.engine.engines_per_node
    setting = Setting(measured.num_nodes, learners, engines, rollout.max_policy_lag)
    own = _config_at(config, setting)
    most = max(_FEWEST_STEPS, _CALIBRATED_ROLLOUTS // (rollout.prompts_per_step * rollout.group_size))
    waited_s = max(sum(step.wait_s for step in measured.steps[:most]), _SHORTEST_S)

    def waits_longer(decode_s: float) -> bool:
        tried = replace(rates, decoding=Rate(decode_s, 0.0), draws=rates.draws[:most])
        simulated_s = 0.0
        for seed in range(_CALIBRATIONS):
            cluster = SimulatedCluster(own, measured.sequences, tried, setting, random.Random(seed))
            run_steps(cluster, len(tried.draws))
            simulated_s += cluster.waited_s / _CALIBRATIONS
        return simulated_s > waited_s

    low = high = max(rates.decoding.fixed_s, _SHORTEST_S)
    while waits_longer(low):
        low /= 2
    while not waits_longer(high):
        high *= 2
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if waits_longer(middle) else (middle, high)
    return replace(rates, decoding=Rate(low, 0.0))


def run_steps(cluster: SimulatedCluster, num_steps: int, on_step: Callable[[], None] = lambda: None) -> None:
    """Have the driver's loop take so many steps on the cluster; `on_step` is called where one would be recorded."""
    config, state = cluster.config, DriverState()
    pool, learners = SimulatedPool(cluster), SimulatedLearners(cluster)
    stream = cast(PromptStream, SimulatedStream(cluster.sequences.prompt_tokens))
    scheduler = RolloutScheduler(config, stream, cast(RolloutPool, pool), state, num_steps)
    loop = TrainingLoop(
        cast(Session, _session(cluster, num_steps, on_step)),
        RolloutBatches(config, scheduler),
        cast(LearnerGroup, learners),
        cast("WeightSync", SimulatedWeights(cluster, pool, learners)),
    )
    loop.run(state)


def _session(cluster: SimulatedCluster, num_steps: int, on_step: Callable[[], None]) -> Any:
    """Make what the loop holds of a run, without a folder: it goes on to the last step, and records nothing."""

    def record_step(state: DriverState, metrics: Any, batch: Batch) -> None:
        timer.finish_step()
        on_step()

    def should_go_on(state: DriverState, *, evaluates: bool) -> bool:
        return state.step < num_steps

    timer = StepTimer(cluster.clock)
    return SimpleNamespace(
        config=cluster.config,
        timer=timer,
        times=SimpleNamespace(steps=SimpleNamespace(p95_s=None)),
        journal=SimpleNamespace(record_step=record_step),
        checkpoints=SimpleNamespace(save_if_due=lambda state: None),
        should_go_on=should_go_on,
        batch_record=lambda step: None,
    )


def _config_at(config: Config, setting: Setting) -> Config:
    """Return the config with the setting's lag, without what needs the data itself: curriculum, sources, texts."""
    rollout = config.rollout.model_copy(update={"max_policy_lag": setting.lag, "logged_fraction": 0.0})
    data = config.data.model_copy(update={"curriculum": None})
    return config.model_copy(update={"rollout": rollout, "data": data})
