"""The training loop: take a batch, train on it, publish the weights.

With `max_policy_lag` > 0 the engines sample the next steps' prompts while the learners train. With 0 the engines wait,
and every rollout is on-policy. Without engines (`weights` is None) nothing is published.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpc_grpo.config import Config
from hpc_grpo.driver.batches import Batch, DemonstrationBatches, RolloutBatches
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.errors import (
    ConfigError,
    EngineLostError,
    EnvironmentLateError,
    GraderLostError,
    PromptError,
    RewardError,
)
from hpc_grpo.metrics.record import StepTimer

if TYPE_CHECKING:
    from hpc_grpo.driver.evaluation import Evaluation
    from hpc_grpo.driver.telemetry import Meters, Profiles


class LoopSession(Protocol):
    """The run around the loop: `Session`, or a simulated one."""

    @property
    def config(self) -> Config: ...

    @property
    def timer(self) -> StepTimer: ...

    @property
    def step_p95_s(self) -> float | None: ...

    def should_go_on(self, state: DriverState, *, evaluates: bool) -> bool: ...

    def batch_record(self, step: int) -> Path | None: ...

    def ends_after(self, step: int, metrics: Mapping[str, float]) -> bool: ...

    def lacks_eval(self, step: int) -> bool: ...

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def record_step(self, state: DriverState, metrics: Mapping[str, float], batch: Batch) -> None: ...

    def save_if_due(self, state: DriverState) -> None: ...

    def save_before_ending(self, state: DriverState, record: Callable[[], None] | None) -> None: ...


class Learners(Protocol):
    def train(self, batch: Batch, record: Path | None) -> dict[str, float]: ...


class Weights(Protocol):
    def publish(self, version: int) -> dict[str, float]: ...

    def put_engines_to_sleep(self) -> None: ...


@dataclass(frozen=True)
class TrainingLoop:
    session: LoopSession
    batches: RolloutBatches | DemonstrationBatches
    learners: Learners
    weights: Weights | None = None
    evaluation: Evaluation | None = None
    meters: Meters | None = None
    profiles: Profiles | None = None

    def run(self, state: DriverState) -> DriverState:
        """Train from `state` until the run is complete or must stop; return the state reached."""
        session, timer = self.session, self.session.timer
        policy_version, _ = self._publish(state)
        if session.lacks_eval(state.step) and (metrics := self._evaluate(state, policy_version)):
            session.record_eval(state.step, metrics)
        self.batches.start(policy_version)
        timer.start_over()
        while session.should_go_on(state, evaluates=self._evaluates_at(state.step + 1, session.step_p95_s)):
            if self.profiles is not None:
                self.profiles.before(state.step + 1)
            with self._saved_if_it_fails(state):
                batch = self.batches.take_step(policy_version, timer)
                if self.weights is not None and session.config.placement.colocate:
                    self.weights.put_engines_to_sleep()
            with timer.phase("train"):
                metrics = {**batch.metrics, **self.learners.train(batch, session.batch_record(state.step + 1))}
            if self.meters is not None:
                self.meters.ask()
            state = DriverState(state.step + 1, batch.ordinals[-1] + 1, batch.curriculum, batch.ahead)
            record = functools.partial(session.record_step, state, metrics, batch)
            with self._saved_if_it_fails(state, record):
                policy_version, checked = self._publish(state)
                metrics |= checked  # recorded even if the eval fails
                metrics |= (evaluated := self._evaluate(state, policy_version))
                ends_here = session.ends_after(state.step, metrics)
                if not ends_here:
                    self.batches.start(policy_version)
                elif not evaluated:
                    metrics |= self._measure(state)
            if self.meters is not None:
                metrics |= self.meters.metrics()
            # Record before the checkpoint: a run killed between the two must not resume past a step without a record.
            record()
            if ends_here:
                break
            session.save_if_due(state)
            if self.profiles is not None:
                self.profiles.after(state.step)
        if self.profiles is not None:
            self.profiles.close()
        return state

    @contextmanager
    def _saved_if_it_fails(self, state: DriverState, record: Callable[[], None] | None = None) -> Iterator[None]:
        """Save `state` if something else than the learners fails, and raise the error.

        The learners are intact, and a resume begins after `state`. Does not save after a WeightSyncError: the
        learners' memory may be damaged. Calls `record` before the save. An error of the save is only printed: the
        first error decides the exit code.
        """
        try:
            yield
        except (ConfigError, RewardError, PromptError, EngineLostError, EnvironmentLateError, GraderLostError) as error:
            print(f"Saving before ending: {error}", flush=True)
            self.session.save_before_ending(state, record)
            raise

    def _publish(self, state: DriverState) -> tuple[int, dict[str, float]]:
        """Publish the learners' weights. Return their version, which counts optimizer steps, and metrics."""
        policy_version = self.session.config.optimizer_steps(state.step)
        if self.weights is None:
            return policy_version, {}
        with self.session.timer.phase("publish"):
            return policy_version, self.weights.publish(policy_version)

    def _evaluates_at(self, step: int, in_s: float | None = None) -> bool:
        return self.evaluation is not None and self.evaluation.is_due(step, in_s or 0.0)

    def _evaluate(self, state: DriverState, policy_version: int) -> dict[str, float]:
        """Evaluate if an eval is due. Return the eval's metrics, or {}.

        With a policy lag, prompts of the next steps start first and run at the same time. The eval's prompts have
        priority (driver/evaluation.py). Without a lag, no prompts start before the eval: a resumed run must form the
        same batches in the engines.
        """
        if not self._evaluates_at(state.step):
            return {}
        if self.session.config.rollout.max_policy_lag:
            self.batches.start(policy_version)
        return self._measure(state)

    def _measure(self, state: DriverState) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        with self.session.timer.phase("eval"):
            return self.evaluation.run(state.step)
