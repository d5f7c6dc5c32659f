"""What a learner saves by computing nothing twice: one learner on CPU, no Ray, no engine.

`python benchmarks/learner_savings.py`: CPU seconds of the learner's process in a whole step, which a busy machine
disturbs less than wall time; medians of three rounds, with all cases in turn in each. Prompts: a group's prompt
computed once, against once a completion. Lengths: one document of 5,000 tokens beside 56 of 200, against the two sorts
alone, each in a process of its own, whose peak memory above the loaded model is told too.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import load_average, median, print_table, run_script

from hpc_grpo.config import Config
from hpc_grpo.types import Minibatch, TrainSequence

SEQUENCE_TOKENS, NUM_SEQUENCES = 320, 16
RATIOS = {"4:1": 256, "1:1": 160, "1:4": 64}
"""Prompt to completion -> tokens of the prompt."""
LENGTHS = {"5,000": [5000], "56 x 200": [200] * 56, "both": [200] * 28 + [5000] + [200] * 28}
_DEADLINE_S = 3600.0


def make_groups(prompt: int, group_size: int) -> list[TrainSequence]:
    random = np.random.default_rng(0)
    made = []
    for ordinal in range(NUM_SEQUENCES // group_size):
        shared = random.integers(2, 200, prompt)
        for sample in range(group_size):
            tokens = np.concatenate([shared, random.integers(2, 200, SEQUENCE_TOKENS - prompt)]).astype(np.int32)
            made.append(_sequence(ordinal, sample, tokens, prompt, 0.5 - sample))
    return made


def make_documents(lengths: Sequence[int]) -> list[TrainSequence]:
    random = np.random.default_rng(0)
    drawn = [random.integers(2, 200, length).astype(np.int32) for length in lengths]
    return [_sequence(index, 0, tokens, len(tokens) // 2, 1.0) for index, tokens in enumerate(drawn)]


def _sequence(ordinal: int, sample: int, tokens: Any, prompt: int, advantage: float) -> TrainSequence:
    is_trained = np.arange(len(tokens)) >= prompt
    zeros = np.zeros(len(tokens), np.float32)
    return TrainSequence(ordinal, sample, tokens, is_trained, is_trained * np.float32(advantage), zeros)


def measure(model: str, cases: Mapping[str, Mapping[str, Any]], rounds: int) -> dict[str, Any]:
    """Return CPU seconds of each round of each case, and the peak above the loaded model in MiB."""
    from hpc_grpo.learner.learner import Learner

    configs = {name: _config(model, case.get("train", {})) for name, case in cases.items()}
    learner = Learner(next(iter(configs.values())), total_optimizer_steps=1000)
    _step(learner, make_documents([16]))
    before = _reset_peak()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            learner.train_by(configs[name])
            is_of_groups = "prompt" in case
            sequences = make_groups(case["prompt"], case["group"]) if is_of_groups else make_documents(case["lengths"])
            seconds[name].append(_step(learner, sequences))
    return {"seconds": seconds, "peak_mib": (_memory("VmHWM") - before) / 1024}


def _step(learner: Any, sequences: Sequence[TrainSequence]) -> float:
    num_tokens = sum(sequence.num_trained_tokens for sequence in sequences)
    begin = time.process_time()
    learner.train_step([Minibatch(tuple(sequences), num_tokens, len(sequences))])
    return time.process_time() - begin


def _config(model: str, train: Mapping[str, Any]) -> Config:
    settings = {
        "run": {"name": "savings"},
        "model": {"path": model, "dtype": "float32", "device": "cpu"},
        "data": {"train": {"path": "unused"}, "max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 16},
        "train": {"total_steps": 1, "max_tokens_per_microbatch": 8192, **train},
    }
    return Config.model_validate(settings)


def _reset_peak() -> int:
    """Forget the process's peak memory, and return what it has now, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmHWM")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def compare_prompts(model: str, size: str, rounds: int) -> None:
    cases: dict[str, dict[str, Any]] = {}
    for ratio, prompt in RATIOS.items():
        for group in (8, 16):
            for shares in (False, True):
                own = {"prompt": prompt, "group": group, "train": {"share_prompts": shares}}
                cases[f"{ratio} {group} {shares}"] = own
    seconds = _run(model, cases, rounds)["seconds"]
    rows = []
    for ratio, prompt in RATIOS.items():
        for group in (8, 16):
            unshared, shared = (median(seconds[f"{ratio} {group} {shares}"]) for shares in (False, True))
            tokens = prompt / group + SEQUENCE_TOKENS - prompt
            counts = f"{tokens / SEQUENCE_TOKENS:.2f}"
            rows.append([f"{ratio}, {group}", f"{unshared:.2f}", f"{shared:.2f}", f"{shared / unshared:.2f}", counts])
    print_table(
        f"Shared prompts, {size}: {NUM_SEQUENCES} sequences of {SEQUENCE_TOKENS} tokens; {load_average()}",
        ["prompt:completion, group", "unshared, CPU s", "shared, CPU s", "ratio", "ratio of tokens"],
        rows,
    )


def compare_lengths(model: str, size: str, rounds: int) -> None:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LENGTHS}
    for _ in range(rounds):
        for name, lengths in LENGTHS.items():
            found[name].append(_run(model, {name: {"lengths": lengths}}, 1))
    seconds = {name: median([own["seconds"][name][0] for own in each]) for name, each in found.items()}
    peaks = {name: median([own["peak_mib"] for own in each]) for name, each in found.items()}
    alone = list(LENGTHS)[:2]
    rows = [[name, f"{seconds[name]:.2f}", f"{peaks[name]:,.0f}"] for name in LENGTHS]
    ratios = [own["both"] / sum(own[name] for name in alone) for own in (seconds, peaks)]
    rows.append(["both / sum of the two", *(f"{ratio:.2f}" for ratio in ratios)])
    print_table(f"Lengths, {size}; {load_average()}", ["documents", "CPU s", "peak, MiB"], rows)


def _run(model: str, cases: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    arguments = ["--model", model, "--cases", json.dumps(cases), "--rounds", str(rounds)]
    return run_script("learner_savings.py", arguments, {"OMP_NUM_THREADS": "1"}, _DEADLINE_S)


@click.command()
@click.option("--size", type=click.Choice(["600k", "31M"]), multiple=True, default=["600k", "31M"])
@click.option("--rounds", default=3)
@click.option("--only", type=click.Choice(["prompts", "lengths"]))
@click.option("--model", hidden=True)
@click.option("--cases", hidden=True)
def main(size: Sequence[str], rounds: int, only: str | None, model: str | None, cases: str | None) -> None:
    if cases is not None:
        print(json.dumps(measure(str(model), json.loads(cases), rounds)))
        return
    from dataclasses import replace

    from vs_trl import SIZES

    from hpc_grpo.demo.model import write_model

    for name in size:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), replace(SIZES[name], max_tokens=8192), seed=0)
            for kind, compare in (("prompts", compare_prompts), ("lengths", compare_lengths)):
                if only in (None, kind):
                    compare(folder, name, rounds)


if __name__ == "__main__":
    main()
