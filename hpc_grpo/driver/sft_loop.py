"""Supervised fine-tuning: the same learners, on demonstrations instead of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_grpo.algorithms.sft import demonstration_sequence
from hpc_grpo.data.demonstrations import DemonstrationStream
from hpc_grpo.driver.checkpoints import DriverState
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.driver.session import Session


@dataclass(frozen=True)
class SftLoop:
    session: Session
    stream: DemonstrationStream
    learners: LearnerGroup

    def run(self, state: DriverState) -> DriverState:
        """Train from `state` until the run is complete or asked to stop; returns the state reached."""
        session, timer = self.session, self.session.journal.timer
        batch_size = session.config.sft.batch_size
        timer.start_over()
        while session.should_go_on(state):
            ordinals = range(state.next_ordinal, state.next_ordinal + batch_size)
            sequences = [demonstration_sequence(self.stream.demonstration(ordinal)) for ordinal in ordinals]
            with timer.phase("train"):
                metrics = self.learners.train_on_sequences(sequences)
            num_tokens = [sequence.num_trained_tokens for sequence in sequences]
            metrics |= {
                "tokens/completion_mean": sum(num_tokens) / len(num_tokens),
                "tokens/completion_total": float(sum(num_tokens)),
            }
            state = DriverState(state.step + 1, ordinals.stop)
            # Before the checkpoint: a run killed between the two must not resume past a step without a record.
            session.journal.record_step(state, metrics, ordinals)
            with timer.phase("checkpoint"):
                session.checkpoints.save_if_due(state)
        return state
