"""The run's records of each finished step (sinks, state.json, ledger, rollouts/step_N.jsonl), and the session."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from hpc_grpo.config import Config
from hpc_grpo.driver.batches import Batch
from hpc_grpo.driver.callback import StepCallback
from hpc_grpo.driver.learners import Checkpoints
from hpc_grpo.driver.rollouts import DriverState
from hpc_grpo.driver.schedule import StepTimes, StopRequest, TrainLength
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.metrics.record import REWARD, StepRecord, StepTimer
from hpc_grpo.metrics.sinks import make_sinks
from hpc_grpo.metrics.usage import slow_node
from hpc_grpo.run.contract import ATTEMPT_VARIABLE
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.ledger import Ledger
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import Phase, RunState, read_metrics, read_state, write_state
from hpc_grpo.run.pulse import PULSE

_NOTED_EVERY_S = 5.0
_RECENT_STEPS = 20
"""Number of last steps that decide which node is slowest."""


class Journal:
    """Measures the phases of a step, and publishes the metrics of each finished step."""

    def __init__(
        self, config: Config, run_dir: RunDir, length: TrainLength, times: StepTimes, timer: StepTimer
    ) -> None:
        self._run_dir, self._length, self._step_times = run_dir, length, times
        last = read_state(run_dir)
        self._metrics: Mapping[str, float] = {} if last is None or last.reward is None else {REWARD: last.reward}
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT_STEPS)
        self._state: RunState | None = None
        self._published_at = 0.0
        self._attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        self._sinks = make_sinks(config, run_dir)
        self._ledger = Ledger(run_dir, self._attempt)
        self.timer = timer
        self.on_step = ""

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the eval before an attempt's first step. Later evals are part of their step's record."""
        times = self.timer.finish_step()
        self._step_times.evals.add(times["time/eval_s"])
        # The other times of a resumed step are in its record; those of this attempt's start do not belong to it.
        own = {"time/eval_s": times["time/eval_s"]} if step else times
        self._write(step, {**metrics, **own})

    def record_step(self, state: DriverState, metrics: Mapping[str, float], batch: Batch) -> None:
        step = state.step
        if batch.lines:
            text = "".join(json.dumps(line) + "\n" for line in batch.lines)
            when_there_is_space(lambda: write_atomic(self._run_dir.rollouts(step), text), "the step's rollouts")
        times = self.timer.finish_step()
        self._ledger.append(step, batch.ordinals, dropped=batch.dropped, passed_over=batch.passed_over)
        self._step_times.add_step(times)
        derived = {
            "data/epochs": state.next_ordinal / self._length.items_per_epoch,
            "throughput/tokens_per_s": metrics["tokens/completion_total"] / times["time/step_s"],
            "time/eta_s": self.timer.eta_s(self._length.total_steps - step) or 0.0,
        }
        self._metrics = {**metrics, **times, **derived}
        self._recent.append(self._metrics)
        self._write(step, self._metrics, batch.lines)
        self.publish_state(step, "training")

    def publish_state(self, step: int, phase: Phase) -> None:
        state = RunState(
            step=step,
            total_steps=self._length.total_steps,
            attempt=self._attempt,
            phase=phase,
            reward=self._metrics.get(REWARD),
            tokens_per_s=self._metrics.get("throughput/tokens_per_s"),
            eta_s=self._metrics.get("time/eta_s"),
            step_p95_s=self._step_times.steps.p95_s,
            eval_p95_s=self._step_times.evals.p95_s,
            save_p95_s=self._step_times.saves.p95_s,
            longest_s=PULSE.longest_s,
            slow_node=slow_node(self._recent),
            on_step=self.on_step,
        )
        self._write_state(state)

    def note_groups(self, waits_for: str, num_groups: int, sampled: int, graded: int) -> None:
        """Publish how many of the step's groups are sampled and graded: at most every 5 s, and when all are graded."""
        is_due = time.monotonic() - self._published_at >= _NOTED_EVERY_S
        if self._state is not None and (is_due or (self._state.num_groups and graded == num_groups)):
            state = replace(self._state, waits_for=waits_for, num_groups=num_groups, sampled=sampled, graded=graded)
            self._write_state(replace(state, phase="training", trained=0, num_microbatches=0))

    def note_microbatches(self, trained: int, total: int) -> None:
        """Publish how many microbatches of the step are trained."""
        if self._state is not None:
            self._write_state(replace(self._state, phase="training", trained=trained, num_microbatches=total))

    def close(self) -> None:
        with ExitStack() as closing:  # closes all sinks even if one raises
            for sink in self._sinks:
                closing.callback(sink.close)

    def _write_state(self, state: RunState) -> None:
        self._state, self._published_at = state, time.monotonic()
        write_state(self._run_dir, state)

    def _write(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]] = ()) -> None:
        record = StepRecord(
            step=step,
            total_steps=self._length.total_steps,
            metrics=metrics,
            attempt=self._attempt,
            epoch=self._length.epoch_of(step),
            total_epochs=self._length.total_epochs,
            rollouts=rollouts,
        )
        for sink in self._sinks:
            sink.write(record)


@dataclass(frozen=True)
class Session:
    """One driver process's part of a run: when it ends, and what it records."""

    config: Config
    run_dir: RunDir
    length: TrainLength
    journal: Journal
    checkpoints: Checkpoints
    stop: StopRequest
    times: StepTimes
    callback: StepCallback | None = None

    @property
    def timer(self) -> StepTimer:
        return self.journal.timer

    @property
    def step_p95_s(self) -> float | None:
        return self.times.steps.p95_s

    @property
    def end_reason(self) -> str:
        """Return why the user's callback has ended the run; "" if it has not."""
        return "" if self.callback is None else self.callback.end_reason

    def ends_after(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Ask the user's callback whether the run is complete after `step`."""
        if self.callback is None:
            return False
        with self.timer.phase("on_step"):
            self.journal.on_step = self.callback.ask(step, metrics)
        return bool(self.end_reason)

    def had_ended(self, step: int) -> bool:
        """Give the user's callback the recorded evals, and ask again whether the run is complete after `step`.

        The driver may have died between this step's checkpoint and COMPLETE.
        """
        if self.callback is None:
            return False
        self.callback.resume(read_metrics(self.run_dir.metrics), step)
        values = {name: value for name, value in self._recorded(step).items() if not name.startswith("time/")}
        return bool(values) and self.ends_after(step, values)

    def lacks_eval(self, step: int) -> bool:
        """Return whether `step` has no recorded eval, which may have failed in the last attempt."""
        return not any(name.startswith("eval/") for name in self._recorded(step))

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an eval before an attempt's first step, together with what is recorded of `step`."""
        if self.callback is not None:
            self.callback.note(step, metrics)
        self.journal.record_eval(step, {**self._recorded(step), **metrics})

    def _recorded(self, step: int) -> dict[str, float]:
        """Return the recorded metrics of `step`; {} for step 0, whose model may have changed before the first step."""
        values = read_metrics(self.run_dir.metrics).get(step, {}) if step else {}
        return {name: value for name, value in values.items() if name not in ("step", "attempt", "time")}

    def record_step(self, state: DriverState, metrics: Mapping[str, float], batch: Batch) -> None:
        self.journal.record_step(state, metrics, batch)

    def save_if_due(self, state: DriverState) -> None:
        with self.timer.phase("checkpoint"):
            self.checkpoints.save_if_due(state)

    def save_before_ending(self, state: DriverState, record: Callable[[], None] | None) -> None:
        """Call `record`, if given, and save. Only prints an error of these: the run already ends by another error."""
        try:
            if record:
                record()
            with self.timer.phase("checkpoint"):
                self.checkpoints.save(state)
        except (HpcGrpoError, RayError) as error:
            print(f"Step {state.step} could not be saved: {error}", flush=True)

    def batch_record(self, step: int) -> Path | None:
        """Return the path for the batch of `step`, or None if batches are not kept.

        Removes older batches beyond `checkpoint.keep_batches`, and batches of `step` and later steps.
        """
        if not (num_kept := self.config.checkpoint.keep_batches):
            return None
        for number, folder in step_dirs(self.run_dir.batches(step).parent).items():
            # An earlier attempt wrote batches of later steps; the run trains these steps again.
            if not step - num_kept < number < step:
                shutil.rmtree(folder)
        return self.run_dir.batches(step)

    def should_go_on(self, state: DriverState, *, evaluates: bool = False) -> bool:
        """Return whether to take one more step; if not, print why. `evaluates`: the step includes an eval."""
        if state.step >= self.length.total_steps:
            return False
        num_saves = 2 if self.checkpoints.is_writing else 1  # The last save waits for the pending save.
        reason = self.stop.reason(self.times.step_and_save_s(evaluates=evaluates, num_saves=num_saves))
        if reason is not None:
            print(f"Stopping after step {state.step}: {reason}.", flush=True)
        return reason is None
