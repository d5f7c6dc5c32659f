"""Read a run's completions from disk: of training steps by prompt, and of held-out prompts over time."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import Any

from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import number_or_none, one_line

EVAL_FILES = r"eval_step_(\d+)\.jsonl"
_MAX_PROMPTS, _MAX_EVALS = 200, 6
"""Limits of shown held-out prompts, and of their evals."""

_MOST_CHARACTERS = 4 << 20
"""Limit of the characters of a set's held-out prompts with their completions."""

_SHOWN_CHARACTERS = 6000
_SHOWN_PROMPTS = 4
_USER = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)user(?:<\|end_header_id\|>)?\s*"
    r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\Z)",
    re.DOTALL,
)
_TOLD = re.compile(_USER.pattern.replace("user", "(?:user|tool|ipython)"), re.DOTALL)
"""The user's text, and also a tool's, in ChatML, Llama 3's and Gemma's chat templates."""


def rollout_files(run: RunDir, of_steps: Collection[int]) -> dict[int, Path]:
    """Return the files with the rollouts of the steps that have one, by step."""
    files = step_dirs(run.rollouts(0).parent, r"step_(\d+)\.jsonl")
    return {step: files[step] for step in sorted(files.keys() & of_steps)}


def read_groups(path: Path, judged_by: Mapping[str, Any], most_bytes: int) -> list[dict[str, Any]]:
    """Return the rollouts of a step by prompt: the first prompts of the file, about `most_bytes` in all.

    `judged_by` is the section `eval` of the config. It names the reward that decides what is right.
    """
    groups: list[dict[str, Any]] = []
    read = 0
    for _, lines in groupby(read_jsonl(path), key=lambda line: line.get("ordinal")):
        own = list(lines)
        groups.append({**_prompt(own[0]), "answers": [_answer(line, _solved(line, judged_by)) for line in own]})
        read += sum(len(answer["text"]) for answer in groups[-1]["answers"]) + 300 * len(own)
        read += sum(map(len, groups[-1]["images"]))
        if read > most_bytes:
            break
    return groups


def held_out(run: RunDir, of_steps: Collection[int]) -> list[dict[str, Any]]:
    """Return prompts of each eval set with their completions at the first eval, the last, and some between.

    Reads the evals after `of_steps`, the steps of the metrics: the file of a lost step remains. `evals` has the
    completions of a prompt, one list for each of `steps`.
    """
    folder = run.rollouts(0).parent
    found = []
    for name in ("", *sorted(next(os.walk(folder), ("", [], []))[1])):
        files = step_dirs(folder / name, EVAL_FILES)
        steps = evenly_spread(sorted(files.keys() & of_steps), _MAX_EVALS)
        stamps = tuple((files[step], files[step].stat().st_mtime_ns) for step in steps)
        if prompts := _through_time(stamps):
            found.append({"set": name, "steps": steps, "prompts": prompts})
    return found


def evenly_spread(steps: list[int], most: int) -> list[int]:
    """Return the steps, or `most` of them, among them the first and the last."""
    last = len(steps) - 1
    return steps if last < most else [steps[index * last // (most - 1)] for index in range(most)]


@lru_cache(maxsize=16)
def _through_time(files: tuple[tuple[Path, int], ...]) -> list[dict[str, Any]]:
    """Return the prompts with their completions in each file. `files` are (path, modification time)."""
    asked_last = (line.get("ordinal") for path, _ in files[-1:] for line in read_jsonl(path))
    ordinals = sorted({ordinal for ordinal in asked_last if isinstance(ordinal, int)})
    chosen = frozenset(ordinals[:: -(-len(ordinals) // _MAX_PROMPTS) or 1])
    prompts: dict[int, dict[str, Any]] = {}
    for position, (path, _) in enumerate(files):
        for line in read_jsonl(path):
            if isinstance(ordinal := line.get("ordinal"), int) and ordinal in chosen:
                prompt = prompts.setdefault(ordinal, {**_prompt(line), "evals": [[] for _ in files]})
                prompt["evals"][position].append(_answer(line, line.get("solved")))
    asked_twice = [own for _, own in sorted(prompts.items()) if own["evals"][0] and own["evals"][-1]]
    sizes = accumulate(len(str(prompt)) for prompt in asked_twice)
    return [prompt for prompt, size in zip(asked_twice, sizes, strict=True) if size <= _MOST_CHARACTERS]


def asked(prompt: str) -> str:
    """Return the last user text of a templated prompt; the complete prompt if the template is unknown."""
    return str((_USER.findall(prompt) or [prompt])[-1]).strip()


def _prompt(line: Mapping[str, Any]) -> dict[str, Any]:
    text, answer = str(line.get("prompt", "")), line.get("answer")
    return {
        "ordinal": line.get("ordinal"),
        "source": str(line.get("source", "")),
        "asked": _cut(asked(text)),
        "prompt": _cut(text),
        "images": [str(image) for image in line.get("images", ())],
        "answer": None if answer is None else _cut(str(answer)),
    }


def _answer(line: Mapping[str, Any], is_right: Any) -> dict[str, Any]:
    """Return the page's data of a completion; `right` is None if its reward failed."""
    parts = line.get("rewards")
    return {
        "text": _cut(str(line.get("completion", ""))),
        "turns": _turns(line),
        "right": is_right if isinstance(is_right, bool) else None,
        "reward": number_or_none(line.get("reward")),
        "parts": {str(name): number_or_none(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
        "advantage": line.get("advantage"),
        "tokens": line.get("tokens"),
        "why": [
            *(["cut off"] if line.get("truncated") else []),
            *(["masked"] if line.get("valid") is False else []),
            *(str(line[key]) for key in ("over_budget", "failure") if line.get(key)),
        ],
    }


def _turns(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an episode's turns, their observations without the words of a known template; [] for a single answer."""
    own, said = line.get("turns"), ["", *_TOLD.findall(str(line.get("completion", "")))]
    turns = [turn for turn in (own if isinstance(own, list) else ()) if isinstance(turn, dict)]
    told = [str(turn.get("observation", "")) for turn in turns]
    if len(said) == len(told) and all(text.strip() in whole for text, whole in zip(said, told, strict=True)):
        told = said  # else the model wrote what looks like the template
    return [
        {
            "observation": _cut(text),
            "text": _cut(str(turn.get("text", ""))),
            "reward": number_or_none(turn.get("reward")),
        }
        for turn, text in zip(turns, told, strict=True)
    ]


def _solved(line: Mapping[str, Any], judged_by: Mapping[str, Any]) -> bool | None:
    """Return whether a rollout solves its prompt, by the rule of `metrics.rollouts.solved`."""
    parts = line.get("rewards")
    values: dict[str, Any] = parts if isinstance(parts, dict) else {}
    name = judged_by.get("reward") or "correctness"
    named: Iterable[Any] = (value for label, value in values.items() if label.partition("#")[0] == name)
    reward = number_or_none(next(iter(named), next(iter(values.values()), line.get("reward"))))
    at = number_or_none(judged_by.get("solved_at"))
    return None if reward is None else reward >= (1.0 if at is None else at)


def before_and_after(run: RunDir, in_their_order: int = 0) -> str:
    """Compare held-out prompts at the first and at the last eval, newly solved ones first.

    `in_their_order`: show this many prompts instead, from each source in turn, whatever their results.
    """
    main = next((own for own in held_out(run, read_metrics(run.metrics)) if not own["set"]), None)
    if main is None or len(main["steps"]) < 2:
        return "Completions are compared once two evals have been written (eval.every, data.held_out, data.eval)."
    shown = []
    for prompt in main["prompts"]:
        judged = [[own for own in prompt["evals"][at] if own["right"] is not None] for at in (0, -1)]
        if all(judged):
            shown.append((prompt, judged[0][0], judged[1][0]))
    if in_their_order:
        turns = defaultdict[str, Iterator[int]](count)
        shown.sort(key=lambda own: next(turns[own[0]["source"]]))
    else:
        shown.sort(key=lambda own: (own[1]["right"], not own[2]["right"]))
    blocks = []
    for prompt, *ends in shown[: in_their_order or _SHOWN_PROMPTS]:
        result = str(prompt["answer"]).rpartition("####")[2]  # GSM8K's result; the complete answer without ####
        blocks.append(f"{_shortened(prompt['asked'])}   (answer: {_shortened(result)})")
        for step, own in zip((main["steps"][0], main["steps"][-1]), ends, strict=True):
            blocks.append(f"  step {step:>4} {'right' if own['right'] else 'wrong'} {_shortened(own['text'])}")
    return "\n".join(blocks)


def _cut(text: str) -> str:
    left_out = len(text) - _SHOWN_CHARACTERS
    half = _SHOWN_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]} [… {left_out:,} characters more …] {text[-half:]}"


def _shortened(text: str) -> str:
    return one_line(text, 400) if text.strip() else ""
