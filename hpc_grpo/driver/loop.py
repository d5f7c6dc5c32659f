"""GRPO: sample groups, train on them, publish the weights.

Each call below is one named part: `rollouts` says which prompts start and waits for their groups, `learners` takes
the optimizer steps, `weights` brings the result to the engines. With `max_policy_lag` > 0 the engines go on sampling
the next steps' prompts while the learners train; with 0 they wait, and every rollout is on-policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ray.exceptions import RayActorError, RayTaskError

from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.driver.eval import Evaluation
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.rollouts import RolloutScheduler
from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.driver.session import Session
from hpc_grpo.driver.statistics import rollout_metrics, write_rollouts
from hpc_grpo.driver.weights import WeightSync
from hpc_grpo.errors import EngineLostError, HpcGrpoError, RewardError


@dataclass(frozen=True)
class GrpoLoop:
    session: Session
    rollouts: RolloutScheduler
    learners: LearnerGroup
    weights: WeightSync
    evaluation: Evaluation | None

    def run(self, state: DriverState) -> DriverState:
        """Train from `state` until the run is complete or asked to stop; returns the state reached."""
        session, timer = self.session, self.session.journal.timer
        policy_version = self._publish(state)
        if state.step == 0 and (metrics := self._evaluate(state)):
            session.journal.record_eval(state.step, metrics)
        self.rollouts.start_prompts(policy_version)
        timer.start_over()
        while session.should_go_on(state, evaluates=self._evaluates_at(state.step + 1)):
            with self._saved_if_it_fails(state), timer.phase("generate_wait"):
                groups = self.rollouts.take_step(policy_version)
            metrics = rollout_metrics(groups, policy_version)
            metrics["engine/restarts"] = self.rollouts.num_engine_restarts
            with timer.phase("train"):
                metrics |= self.learners.train_on_groups(groups)
            state = DriverState(state.step + 1, groups[-1].prompt.ordinal + 1)
            record = functools.partial(self._record, state, groups, metrics)
            with self._saved_if_it_fails(state, record):
                policy_version = self._publish(state)
                # Before new prompts start: in synchronous mode a resumed run must meet the same batches.
                metrics |= self._evaluate(state)
            self.rollouts.start_prompts(policy_version)
            # Before the checkpoint: a run killed between the two must not resume past a step without a record.
            record()
            with timer.phase("checkpoint"):
                session.checkpoints.save_if_due(state)
        return state

    @contextmanager
    def _saved_if_it_fails(self, state: DriverState, record: Callable[[], None] | None = None) -> Iterator[None]:
        """Rewards or engines that fail lose no step: the learners are well, and the run is resumed from here.

        Not so after a WeightSyncError: it may be the learners' own memory that is damaged, or they that do not answer.
        `record` puts the last step on record, where that is still to be done. A save that fails as well is only told:
        the first error is the cause, and its exit code stands.
        """
        try:
            yield
        except (RewardError, EngineLostError) as error:
            print(f"Saving before ending: {error}", flush=True)
            try:
                if record:
                    record()
                with self.session.journal.timer.phase("checkpoint"):
                    self.session.checkpoints.save(state)
            except (HpcGrpoError, RayTaskError, RayActorError) as save_error:
                print(f"Step {state.step} could not be saved: {save_error}", flush=True)
            raise

    def _record(self, state: DriverState, groups: Sequence[GradedGroup], metrics: Mapping[str, float]) -> None:
        advantages = [self.learners.advantages(group) for group in groups]
        write_rollouts(self.session.run_dir, state.step, groups, advantages)
        self.session.journal.record_step(state, metrics, [group.prompt.ordinal for group in groups])

    def _publish(self, state: DriverState) -> int:
        """Give the engines the learners' weights; the version counts the optimizer steps they have taken."""
        policy_version = state.step * self.session.config.train.num_minibatches
        with self.session.journal.timer.phase("publish"):
            self.weights.publish(policy_version)
        return policy_version

    def _evaluates_at(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.is_due(step, self.session.budget.total_steps)

    def _evaluate(self, state: DriverState) -> dict[str, float]:
        if self.evaluation is None or not self._evaluates_at(state.step):
            return {}
        with self.session.journal.timer.phase("eval"):
            return self.evaluation.run(state.step)
