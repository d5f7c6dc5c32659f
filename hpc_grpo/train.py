"""The driver: `python -m hpc_grpo.train RUN_DIR`, started by the supervisor with RAY_ADDRESS set.

Consumes the run directory's config and newest checkpoint; produces checkpoints, metrics, exports and COMPLETE.
Its exit code says how it ended (see errors.py). It knows Ray and the run directory, and nothing of Slurm.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray

from hpc_grpo.budget import make_budget
from hpc_grpo.checkpoints import Checkpoints, DriverState
from hpc_grpo.config import Config, load_resolved
from hpc_grpo.data import DemonstrationStream, PromptStream, load_items
from hpc_grpo.errors import EXIT_COMPLETE, EXIT_RESUMABLE, HpcGrpoError
from hpc_grpo.grpo import GrpoLoop
from hpc_grpo.journal import Journal
from hpc_grpo.model_files import load_tokenizer, stop_token_ids
from hpc_grpo.placement import reserve_nodes
from hpc_grpo.rollout.evaluation import Evaluation
from hpc_grpo.rollout.scheduler import GroupSampler, RolloutScheduler
from hpc_grpo.run_dir import RunDir, write_atomic
from hpc_grpo.session import Session
from hpc_grpo.sft import SftLoop
from hpc_grpo.stopping import StopRequest
from hpc_grpo.workers import Workers

Stream = PromptStream | DemonstrationStream


def train(run_dir: RunDir) -> bool:
    """Carry the run on from its newest checkpoint; True when it is complete now, False when it stopped early.

    Raises HpcGrpoError for whatever the user can act on.
    """
    config = load_resolved(run_dir.config)
    tokenizer = load_tokenizer(config)
    stream = _stream(config, tokenizer)
    budget = make_budget(config, len(stream))
    stop = StopRequest(run_dir)
    ray.init(address="auto", log_to_driver=False, configure_logging=False, namespace="hpc-grpo")
    workers = Workers(
        config,
        reserve_nodes(config),
        tokenizer,
        stop_token_ids(config, tokenizer),
        budget.total_steps * config.train.num_minibatches,
    )
    workers.start()
    checkpoints = Checkpoints(config, run_dir, workers.learners)
    session = Session(config, run_dir, budget, Journal(config, run_dir, budget), checkpoints, stop)
    try:
        state = _run_loop(session, workers, stream, tokenizer)
    finally:
        session.journal.close()
    checkpoints.save(state)
    if not session.is_complete(state):
        return False
    checkpoints.export(state)
    write_atomic(run_dir.complete_marker, f"step {state.step}\n")
    print(f"COMPLETE after {state.step} steps. Model: {run_dir.export(state.step)}", flush=True)
    return True


def _run_loop(session: Session, workers: Workers, stream: Stream, tokenizer: Any) -> DriverState:
    state = session.checkpoints.resume()
    if state.step:
        print(f"Resuming after step {state.step} of {session.budget.total_steps}.", flush=True)
    if isinstance(stream, DemonstrationStream):
        return SftLoop(session, stream, workers.learners).run(state)
    sampler = workers.group_sampler()
    rollouts = RolloutScheduler(session.config, stream, sampler, state.step, session.budget.total_steps)
    evaluation = _evaluation(session, sampler, tokenizer)
    return GrpoLoop(session, rollouts, workers.learners, workers.connect_weights(), evaluation).run(state)


def _stream(config: Config, tokenizer: Any) -> Stream:
    items = load_items(config.data.train)
    if config.task == "sft":
        return DemonstrationStream(config, items, tokenizer, config.run.seed)
    return PromptStream(config, items, tokenizer, config.run.seed)


def _evaluation(session: Session, sampler: GroupSampler, tokenizer: Any) -> Evaluation | None:
    config, dataset = session.config, session.config.data.eval
    if config.eval.every_steps is None or dataset is None:
        return None
    items = load_items(dataset)
    stream = PromptStream(config, items, tokenizer, config.run.seed, dataset=dataset, shuffle=False)
    return Evaluation(config, stream, sampler, session.run_dir)


def main() -> int:
    run_dir = RunDir(Path(sys.argv[1]))
    try:
        return EXIT_COMPLETE if train(run_dir) else EXIT_RESUMABLE
    except HpcGrpoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
