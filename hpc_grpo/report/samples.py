"""Take a bounded sample of the rollouts that a run has on disk, however many there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import number_or_none

SHOWN_STEPS = 5
SHOWN_OF_A_STEP = 32
_SHOWN_CHARACTERS = 3000
_MEASURED_OF_A_STEP = 2000
_LONGEST = 1 << 31
"""No completion has more tokens: what a file says beyond is no length."""
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class Rollout:
    """Hold what a reader is shown of a rollout. Texts are cut in their middle; `parts` are the rewards by name."""

    step: int
    ordinal: int
    source: str
    prompt: str
    completion: str
    reward: float | None
    parts: dict[str, float | None]
    advantage: float | None


@dataclass(frozen=True)
class Samples:
    """Hold the first rollouts of a few steps, and the sizes of what they were taken from.

    `lengths` are those of a step's completions, by step, in `unit`: characters where a run did not record tokens.
    """

    rollouts: tuple[Rollout, ...] = ()
    steps: tuple[int, ...] = ()
    num_steps: int = 0
    num_bytes: int = 0
    lengths: tuple[tuple[int, tuple[int, ...]], ...] = ()
    unit: str = "tokens"


def take_samples(run: RunDir) -> Samples:
    """Take the first rollouts of the first step on record, of the last one, and of a few evenly between them.

    Not chosen by how they ended, so that a reader sees what is usual. Of all other files only the size is read.
    """
    folder = run.rollouts(0).parent
    found = ((_STEP_FILE.fullmatch(path.name), path) for path in folder.glob("step_*.jsonl"))
    files = {int(match[1]): path for match, path in found if match}
    steps = evenly(sorted(files), SHOWN_STEPS)
    lines = {step: list(islice(read_jsonl(files[step]), _MEASURED_OF_A_STEP)) for step in steps}
    has_tokens = all(_is_length(line.get("tokens")) for of_step in lines.values() for line in of_step)
    unit = "tokens" if has_tokens else "characters"
    return Samples(
        rollouts=tuple(_rollout(step, line) for step in steps for line in lines[step][:SHOWN_OF_A_STEP]),
        steps=tuple(steps),
        num_steps=len(files),
        num_bytes=sum(_size(path) for path in files.values()),
        lengths=tuple(
            (step, tuple(_length(line, unit) for line in lines[step])) for step in dict.fromkeys(steps[:1] + steps[-1:])
        ),
        unit=unit,
    )


def evenly(values: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the values, the first and the last among them.

    >>> evenly(range(101), 5), evenly([1, 2], 5)
    ([0, 25, 50, 75, 100], [1, 2])
    """
    if len(values) <= count:
        return list(values)
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]


def _rollout(step: int, line: dict[str, Any]) -> Rollout:
    parts = line.get("rewards")
    return Rollout(
        step=step,
        ordinal=line.get("ordinal", -1),
        source=str(line.get("source", "")),
        prompt=_cut(str(line.get("prompt", ""))),
        completion=_cut(str(line.get("completion", ""))),
        reward=number_or_none(line.get("reward")),
        parts={str(name): number_or_none(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        advantage=number_or_none(line.get("advantage")),
    )


def _cut(text: str) -> str:
    left_out = len(text) - _SHOWN_CHARACTERS
    half = _SHOWN_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]} [… {left_out:,} characters more …] {text[-half:]}"


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= _LONGEST


def _length(line: dict[str, Any], unit: str) -> int:
    return int(line["tokens"]) if unit == "tokens" else len(str(line.get("completion", "")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed meanwhile, as a running job does with old steps
        return 0
