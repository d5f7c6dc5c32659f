"""Learners in processes of their own, for the tests beside this file: what each rank runs, and how it is started."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpc_grpo.config import Config
from hpc_grpo.template.environment import MODULES
from hpc_grpo.types import Minibatch, TrainSequence
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence

VOCABULARY = 200

_IMPORTED_ONCE = ["pytest", *(module.format(model_type="qwen2") for module in MODULES["learner"])]
"""Take longer to import than most tests here: the process that ranks are forked from does it, for all of them."""


def make_config(model: Path, root: Path, **train: Any) -> Config:
    """A config of a tiny CPU model; `train` overrides the training section."""
    defaults: dict[str, Any] = {"total_steps": 10, "lr": 1e-3, "max_tokens_per_microbatch": 64}
    defaults["adamw"] = {"eps": 1e-4, "weight_decay": 0.1}
    return minimal_config(
        run={"root": str(root)},
        model={"path": str(model), "dtype": "float32", "device": "cpu"},
        data={"max_prompt_tokens": 16},
        rollout={"max_new_tokens": 32, "temperature": 0.8},
        loss={"kl": {"coef": 0.1}},
        train={**defaults, **train},
    )


def make_sequences(seed: int, count: int = 12) -> list[TrainSequence]:
    """Sequences of 4 to 32 tokens with advantages and engine logprobs of a plausible size."""
    random = np.random.default_rng(seed)
    sequences = []
    for index in range(count):
        prompt, completion = int(random.integers(1, 9)), int(random.integers(3, 24))
        tokens = random.integers(2, VOCABULARY, prompt + completion).astype(np.int32)
        logprobs = random.normal(-5.3, 0.3, completion).astype(np.float32)
        advantage = float(random.normal())
        sequences.append(ordinary_sequence(index // 4, index % 4, tokens, completion, logprobs, advantage))
    return sequences


def make_groups() -> list[TrainSequence]:
    """Three groups whose sequences begin alike, up to the first token that one of the group trains."""
    made = make_sequences(7)
    for start in range(0, len(made), 4):
        group = made[start : start + 4]
        front = min(len(each.token_ids) - each.num_trained_tokens for each in group)
        for each in group[1:]:
            each.token_ids[:front] = group[0].token_ids[:front]
    return made


def make_step(seed: int, rank: int, world_size: int, num_minibatches: int = 1) -> list[Minibatch]:
    """This rank's share of a step: three quarters go to rank 0, and of an uneven seed's everything."""
    minibatches = []
    for index in range(num_minibatches):
        sequences = make_sequences(seed * 10 + index)
        cut = 9 if seed % 3 else len(sequences)
        shares = [tuple(sequences)] if world_size == 1 else [tuple(sequences[:cut]), tuple(sequences[cut:])]
        valid = sum(sequence.num_trained_tokens for sequence in sequences)
        minibatches.append(Minibatch(shares[rank], valid, sum(map(len, shares))))
    return minibatches


def weights_of(learner: Any) -> dict[str, Any]:
    """Name -> float32 array, which holds every bfloat16."""
    from hpc_grpo.learner.model import gathered

    with gathered(learner.model, [spec.name for spec in learner.parameter_specs()]) as parameters:
        return {name: tensor.float().numpy().copy() for name, tensor in parameters.items()}


def run_ranks(world_size: int, scenario: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `scenario(rank, world_size, store, *args)` in processes of their own; their results, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(rank, world_size, Path(folder), results, scenario, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        ends_at = time.monotonic() + 400.0
        try:
            while len(answers) < world_size:
                try:
                    rank, answer = results.get(timeout=1.0)
                    answers[rank] = answer
                except queue.Empty:
                    dead = [process.exitcode for process in processes if process.exitcode]
                    assert not dead, f"a rank ended with exit code {dead} and without an answer"
                    assert time.monotonic() < ends_at, f"ranks {set(range(world_size)) - answers.keys()} do not answer"
        finally:
            for process in processes:
                process.join(timeout=60)
                if process.is_alive():
                    process.kill()
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return [answers[rank] for rank in range(world_size)]


def _run_rank(rank: int, world_size: int, folder: Path, results: Any, scenario: Any, args: tuple[Any, ...]) -> None:
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # as a learner's environment has it
    try:
        store = dist.FileStore(str(folder / "store"), world_size) if world_size > 1 else None
        results.put((rank, scenario(rank, world_size, store, *args)))
    except Exception as error:  # noqa: BLE001 - carried to the test that started this process
        results.put((rank, error))


def save_together(learner: Any, directory: Path, driver_state: dict[str, Any], *, behind: bool = False) -> Any:
    """Stage a checkpoint on all ranks; return what writes and publishes it, a collective of the test's own."""
    import torch.distributed as dist

    from hpc_grpo.learner.checkpoint import CheckpointWriter

    writer = CheckpointWriter(learner, directory, driver_state, behind=behind)

    def publish() -> None:
        shares: list[Any] = [None] * learner.world_size
        dist.all_gather_object(shares, writer.write())
        if learner.rank == 0:
            writer.publish(shares)
        dist.barrier()

    return publish
