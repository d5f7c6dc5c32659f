"""Take a bounded sample of the completions that a run has on disk, of training and of its evals."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import number_or_none, one_line

SHOWN_STEPS = 5
SHOWN_OF_A_STEP = 32
_SHOWN_CHARACTERS = 3000
_MEASURED_OF_A_STEP = 2000
_LONGEST = 1 << 31
"""No completion has more tokens: a larger number in a file is not a length."""

_SHOWN_PROMPTS = 4
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


@dataclass(frozen=True)
class Rollout:
    """What a reader is shown of a rollout. Texts are cut in their middle; `parts` are the rewards by name."""

    step: int
    ordinal: int
    source: str
    prompt: str
    completion: str
    reward: float | None
    parts: dict[str, float | None]
    advantages: tuple[float | None, ...]
    """One for the whole rollout, or one for each of its turns."""


@dataclass(frozen=True)
class Samples:
    """The first rollouts of a few steps, and the sizes of what they were taken from.

    `lengths` are those of completions at the first and the last step on record, in tokens.
    """

    rollouts: list[Rollout]
    steps: list[int]
    num_steps: int
    num_bytes: int
    lengths: dict[int, list[int]]


def take_samples(run: RunDir) -> Samples:
    """Take the first rollouts of the first step on record, of the last one, and of a few evenly between them.

    Not chosen by how they ended, so that a reader sees what is usual. Of all other files only the size is read.
    """
    files = files_by_step(run.rollouts(0).parent, "step_")
    steps = sorted(files)
    if (count := len(steps)) > SHOWN_STEPS:
        steps = [steps[index * (count - 1) // (SHOWN_STEPS - 1)] for index in range(SHOWN_STEPS)]
    lines = {step: list(islice(read_jsonl(files[step]), _MEASURED_OF_A_STEP)) for step in steps}
    return Samples(
        rollouts=[_rollout(step, line) for step in steps for line in lines[step][:SHOWN_OF_A_STEP]],
        steps=steps,
        num_steps=len(files),
        num_bytes=sum(_size(path) for path in files.values()),
        lengths={
            step: [n for line in lines[step] if isinstance(n := line.get("tokens"), int) and 0 <= n <= _LONGEST]
            for step in steps[:1] + steps[-1:]
        },
    )


def before_and_after(run: RunDir, in_their_order: int = 0) -> str:
    """Compare the same held-out prompts at the first and at the last eval, newly solved ones first.

    With `in_their_order` the first so many instead, of each source in turn: not chosen by how they ended.
    """
    files = files_by_step(run.eval_rollouts(0).parent, "eval_step_")
    if len(files) < 2:
        return "Completions are compared once two evals have been written."
    begin, end = min(files), max(files)
    first, last = _first_samples(files[begin]), _first_samples(files[end])
    shared = sorted(first.keys() & last.keys())
    if in_their_order:
        counts = Counter[str]()
        turns = {}
        for ordinal in shared:
            turns[ordinal] = counts[last[ordinal]["source"]]
            counts[last[ordinal]["source"]] += 1
        shared.sort(key=turns.__getitem__)
    else:
        shared.sort(key=lambda ordinal: (bool(first[ordinal]["solved"]), not last[ordinal]["solved"], ordinal))
    blocks = []
    for ordinal in shared[: in_their_order or _SHOWN_PROMPTS]:
        prompt, answer = str(last[ordinal]["prompt"]), str(last[ordinal]["answer"])
        asked = (_USER_TURN.findall(prompt) or [prompt])[-1]
        result = answer.rpartition("####")[2]  # GSM8K's form; of another form, everything
        lines = [f"{_shortened(asked)}   (answer: {_shortened(result)})"]
        for step, sample in ((begin, first[ordinal]), (end, last[ordinal])):
            verdict = "right" if sample["solved"] else "wrong"
            lines.append(f"  step {step:>4} {verdict} {_shortened(sample['completion'])}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def files_by_step(folder: Path, prefix: str) -> dict[int, Path]:
    found = ((re.fullmatch(rf"{prefix}(\d+)\.jsonl", path.name), path) for path in folder.glob(f"{prefix}*.jsonl"))
    return {int(match[1]): path for match, path in found if match}


def _first_samples(path: Path) -> dict[int, dict[str, Any]]:
    """Return the first completion of every prompt whose reward did not fail, by ordinal."""
    samples: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if line["solved"] is not None:
            samples.setdefault(line["ordinal"], line)
    return samples


def _rollout(step: int, line: dict[str, Any]) -> Rollout:
    parts, advantage = line.get("rewards"), line.get("advantage")
    return Rollout(
        step=step,
        ordinal=line.get("ordinal", -1),
        source=str(line.get("source", "")),
        prompt=_cut(str(line.get("prompt", ""))),
        completion=_cut(str(line.get("completion", ""))),
        reward=number_or_none(line.get("reward")),
        parts={str(name): number_or_none(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        advantages=tuple(map(number_or_none, advantage if isinstance(advantage, list) else [advantage])),
    )


def _cut(text: str) -> str:
    left_out = len(text) - _SHOWN_CHARACTERS
    half = _SHOWN_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]} [… {left_out:,} characters more …] {text[-half:]}"


def _shortened(text: str) -> str:
    return one_line(text, 400) if text.strip() else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed meanwhile, as a running job does with old steps
        return 0
