"""Take a bounded sample of the completions that a run has on disk, of training and of its evals."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
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
    advantage: float | None


@dataclass(frozen=True)
class Samples:
    """The first rollouts of a few steps, and the sizes of what they were taken from.

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
    files = _files_by_step(run.rollouts(0).parent, "step_")
    steps = sorted(files)
    if (count := len(steps)) > SHOWN_STEPS:
        steps = [steps[index * (count - 1) // (SHOWN_STEPS - 1)] for index in range(SHOWN_STEPS)]
    lines = {step: list(islice(read_jsonl(files[step]), _MEASURED_OF_A_STEP)) for step in steps}
    has_tokens = all(_is_length(line.get("tokens")) for of_step in lines.values() for line in of_step)
    lengths = {
        step: tuple(line["tokens"] if has_tokens else len(str(line.get("completion", ""))) for line in lines[step])
        for step in steps[:1] + steps[-1:]
    }
    return Samples(
        rollouts=tuple(_rollout(step, line) for step in steps for line in lines[step][:SHOWN_OF_A_STEP]),
        steps=tuple(steps),
        num_steps=len(files),
        num_bytes=sum(_size(path) for path in files.values()),
        lengths=tuple(lengths.items()),
        unit="tokens" if has_tokens else "characters",
    )


def before_and_after(run: RunDir, in_their_order: int = 0) -> str:
    """Compare the same held-out prompts at the first and at the last eval, newly solved ones first.

    With `in_their_order` the first so many instead, of each source in turn: not chosen by how they ended.
    """
    files = _files_by_step(run.eval_rollouts(0).parent, "eval_step_")
    if len(files) < 2:
        return "Completions are compared once two evals have been written."
    begin, end = min(files), max(files)
    first, last = _first_samples(files[begin]), _first_samples(files[end])
    shared = sorted(first.keys() & last.keys())
    if in_their_order:
        shared = _sources_in_turn({ordinal: last[ordinal]["source"] for ordinal in shared})
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


def _files_by_step(folder: Path, prefix: str) -> dict[int, Path]:
    found = ((re.fullmatch(rf"{prefix}(\d+)\.jsonl", path.name), path) for path in folder.glob(f"{prefix}*.jsonl"))
    return {int(match[1]): path for match, path in found if match}


def _sources_in_turn(sources: Mapping[int, str]) -> list[int]:
    """Order ordinals so that the first of each source come first, then the second of each.

    >>> _sources_in_turn({0: "gcd", 1: "gcd", 2: "sums"})
    [0, 2, 1]
    """
    of_source: dict[str, list[int]] = defaultdict(list)
    for ordinal, source in sources.items():
        of_source[source].append(ordinal)
    turns = {ordinal: turn for ordinals in of_source.values() for turn, ordinal in enumerate(ordinals)}
    return sorted(turns, key=lambda ordinal: (turns[ordinal], ordinal))


def _first_samples(path: Path) -> dict[int, dict[str, Any]]:
    """Return the first completion of every prompt whose reward did not fail, by ordinal."""
    samples: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if line["solved"] is not None:
            samples.setdefault(line["ordinal"], line)
    return samples


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


def _shortened(text: str) -> str:
    return one_line(text, 400) if text.strip() else ""


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= _LONGEST


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed meanwhile, as a running job does with old steps
        return 0
