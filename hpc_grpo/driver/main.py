"""The driver: `python -m hpc_grpo.driver.main RUN_DIR`, started by the supervisor while Ray starts.

Reads the run directory's config and newest checkpoint; writes checkpoints, metrics, exports and COMPLETE. It loads the
user's inputs while Ray starts. Then it starts the actors, resumes, and runs the loop. Its exit code says how it ended
(see errors.py). It reads nothing of Slurm.
"""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from ray.exceptions import RayError

from hpc_grpo.config import Config
from hpc_grpo.data.fingerprint import fingerprints
from hpc_grpo.data.stream import DemonstrationStream, PromptStream
from hpc_grpo.driver.actors import Workers, reserve_nodes
from hpc_grpo.driver.batches import DemonstrationBatches, RolloutBatches
from hpc_grpo.driver.callback import StepCallback
from hpc_grpo.driver.evaluation import EvalSets, Evaluation
from hpc_grpo.driver.inputs import Inputs, load_inputs
from hpc_grpo.driver.journal import Journal, Session
from hpc_grpo.driver.learners import Checkpoints, refuse_without_checkpoint
from hpc_grpo.driver.loop import TrainingLoop
from hpc_grpo.driver.remote import connect, run_driver
from hpc_grpo.driver.rollouts import DriverState, RolloutScheduler
from hpc_grpo.driver.schedule import StepTimes, StopRequest, train_length, wait_for_ray
from hpc_grpo.driver.weights import Canary
from hpc_grpo.errors import EndAskedError, EngineLostError, HpcGrpoError, WeightSyncError
from hpc_grpo.metrics.record import BETWEEN, StepTimer, phase_name
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.compiled import save_behind
from hpc_grpo.run.files import space_awaited_while, write_atomic
from hpc_grpo.run.frozen_config import read_config, take_inputs
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from hpc_grpo.run.pulse import PULSE, patience_of_driver
from hpc_grpo.system.say import say
from hpc_grpo.types import Prompt


def train(run_dir: RunDir) -> bool:
    """Train from the newest checkpoint. Return True if the run is complete, False if it stopped early."""
    config, timer, before = read_config(run_dir), StepTimer(on_phase=partial(_begin, set())), read_state(run_dir)
    PULSE.open("driver", patience_of_driver(config), before.longest_s if before else None)
    with timer.phase("inputs"):
        refuse_without_checkpoint(run_dir)
        inputs = load_inputs(config, is_resume=before is not None)
        assert inputs.stream is not None, "load_inputs reads it for training"
        take_inputs(run_dir, fingerprints(config, Path(), inputs.item_digests))
    length = train_length(config, len(inputs.stream))
    stop = StopRequest(run_dir)
    address = wait_for_ray(lambda: stop.reason(0.0) is not None)
    if address is None:
        return False
    with timer.phase("connect"):
        connect(address)
    stop.listen()
    times = StepTimes.after(before)
    journal = Journal(config, run_dir, length, times, timer)
    with space_awaited_while(partial(_refuse_where_stop_is_asked, stop, run_dir)), closing(journal):
        with timer.phase("start"):
            workers = Workers(config, reserve_nodes(config), inputs, config.optimizer_steps(length.total_steps))
            workers.start()
        save_behind()
        checkpoints = Checkpoints(config, run_dir, workers.learners, times.saves, length)
        on_step, deadline_s = config.train.on_step, config.deadlines.silent_s
        callback = StepCallback(on_step, deadline_s) if on_step is not None else None
        session = Session(config, run_dir, length, journal, checkpoints, stop, times, callback)
        try:
            state = _run_loop(session, workers, inputs)
        except (HpcGrpoError, RayError) as error:
            if isinstance(error, WeightSyncError | EngineLostError):
                workers.stop()  # The next driver must not keep engines that this driver found faulty.
            with timer.phase("checkpoint"):
                checkpoints.close()
            raise
        save_behind()
        is_complete = state.step >= length.total_steps or bool(session.end_reason)
        with timer.phase("checkpoint"):
            checkpoints.save(state)
        if is_complete:
            with timer.phase("checkpoint"):
                checkpoints.export(state)
        journal.publish_state(state.step, "complete" if is_complete else "stopped")
    if is_complete:
        write_atomic(run_dir.complete_marker, f"step {state.step}\n{session.end_reason}".rstrip() + "\n")
        print(f"COMPLETE after {state.step} steps. Model: {run_dir.export(state.step)}", flush=True)
        print(f"What it learned: hpc-grpo report {run_dir.path}", flush=True)
        print(f"Delete {run_dir.checkpoints} to free disk, unless you extend, fork or replay the run.", flush=True)
    return is_complete


def _refuse_where_stop_is_asked(stop: StopRequest, run_dir: RunDir) -> None:
    if (reason := stop.reason(0.0)) is not None:
        step = newest_step(run_dir)
        print(f"Stopping after step {step}: the disk is full ({reason}). No later step is saved.", flush=True)
        raise EndAskedError(f"the disk is full ({reason})", step)


def _begin(said: set[str], phase: str) -> None:
    """Report the phase to the pulse. Print each phase once, when it first begins: it may take minutes."""
    PULSE.turn_to(phase)
    if phase != BETWEEN and (name := phase_name(phase)) not in said:
        said.add(name)
        say(f"Phase: {name}")


def _run_loop(session: Session, workers: Workers, inputs: Inputs) -> DriverState:
    config, timer = session.config, session.timer
    with timer.phase("resume"):
        state = session.checkpoints.resume()
    if session.had_ended(state.step):
        return state
    session.journal.publish_state(state.step, "starting")
    workers.learners.on_progress = session.journal.note_microbatches
    if state.step:
        print(f"Resuming after step {state.step} of {session.length.total_steps}.", flush=True)
    profiles = workers.profiles(session.run_dir)
    if isinstance(inputs.stream, DemonstrationStream):
        demonstrations = DemonstrationBatches(config, inputs.stream, state.next_ordinal)
        loop = TrainingLoop(session, demonstrations, workers.learners, meters=workers.meters, profiles=profiles)
        return loop.run(state)
    assert inputs.stream is not None
    with timer.phase("weights"):
        weights = workers.connect_weights(Canary(config, _probe(inputs.stream, config)))
    pool = workers.rollout_pool(weights)
    pool.on_progress = session.journal.note_groups
    scheduler = RolloutScheduler(config, inputs.stream, pool, state, session.length.total_steps)
    evaluation = None
    if inputs.eval_streams:
        sets = EvalSets(config, inputs.eval_streams, pool)
        evaluation = Evaluation(config, sets, session.run_dir, session.length)
    batches = RolloutBatches(config, scheduler)
    return TrainingLoop(session, batches, workers.learners, weights, evaluation, workers.meters, profiles).run(state)


def _probe(stream: PromptStream, config: Config) -> Prompt:
    """Return the prompt of the canary: the first of the run, or the first with images if one of 64 has any.

    A prompt without images does not prove the weights of a vision tower.
    """
    firsts = map(stream.prompt, range(64) if config.data.images else ())
    return next((prompt for prompt in firsts if prompt.images), None) or stream.prompt(0)


def main() -> int:
    return run_driver(train)


if __name__ == "__main__":
    sys.exit(main())
