"""Cut a learner's sequences into microbatches of about equal cost. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from hpc_grpo.config.resources import KEYS_OF_A_TOKEN, Budget
from hpc_grpo.types import TrainSequence

_PAIRS_OF_A_TOKEN = 6 * 1024
"""Query-key pairs that cost as much as a token outside attention: 4 d against 24 d^2 FLOPs per layer.

Uses d = 1024 for all models, because costs only balance microbatches and ranks.
"""


def cost(prompt: int, completions: Sequence[int], *, is_shared: bool) -> float:
    """Return the cost of a prompt with its completions for a learner, in tokens. Arguments are lengths in tokens."""
    times = min(1, len(completions)) if is_shared else len(completions)
    pairs = times * prompt**2 / 2 + sum(own * prompt + own**2 / 2 for own in completions)
    return times * prompt + sum(completions) + pairs / _PAIRS_OF_A_TOKEN


def shared_length(group: Sequence[TrainSequence]) -> int:
    """Count the equal, untrained tokens at the front of all sequences; 0 for a single sequence."""
    if len(group) < 2:
        return 0
    front = min(int(sequence.loss_mask.argmax()) for sequence in group)
    import numpy as np

    rows = np.stack([sequence.token_ids[:front] for sequence in group])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else front


def split_microbatches(
    sequences: Sequence[TrainSequence], budget: Budget, at_least: int = 0
) -> list[list[TrainSequence]]:
    """Cut sequences into microbatches of about equal cost: the fewest that the budget allows, or `at_least`.

    The costliest microbatch comes first, so ranks wait less. The order of the input does not change the result. A
    sequence longer than the budget has its own microbatch. Few sequences may give fewer than `at_least` microbatches.
    """
    bundles = sorted(_bundles(sorted(sequences, key=_place), budget), key=lambda own: -own.cost)
    fewest: list[list[_Bundle]] = []
    totals: list[int] = []
    for bundle in sorted(bundles, key=lambda own: -own.num_tokens):  # largest first, into the first part with room
        fitting = (i for i, total in enumerate(totals) if total + bundle.num_tokens <= budget.max_tokens)
        place = next(fitting, len(fewest))
        if place == len(fewest):
            fewest.append([])
            totals.append(0)
        fewest[place].append(bundle)
        totals[place] += bundle.num_tokens
    parts = _balanced(bundles, budget.max_tokens, max(len(fewest), at_least)) or fewest
    parts.sort(key=lambda part: (-sum(own.cost for own in part), _place(part[0].sequences[0])))
    return [sorted((sequence for own in part for sequence in own.sequences), key=_place) for part in parts]


@dataclass(frozen=True)
class _Bundle:
    """Sequences that stay together, their tokens, and their cost."""

    sequences: list[TrainSequence]
    num_tokens: int
    cost: float


def _bundles(sequences: Sequence[TrainSequence], budget: Budget) -> list[_Bundle]:
    """Return a bundle for each sequence, or bundles of as many sequences with a shared prompt as the budget allows."""
    made: list[_Bundle] = []
    for sequence in sequences:
        if budget.shares_prompts and made and made[-1].sequences[0].ordinal == sequence.ordinal:
            longer = _bundle([*made[-1].sequences, sequence])
            if longer.num_tokens <= budget.max_tokens:
                made[-1] = longer
                continue
        made.append(_bundle([sequence]))
    return made


def _bundle(sequences: list[TrainSequence]) -> _Bundle:
    lengths = [len(sequence.token_ids) for sequence in sequences]
    prompt = shared_length(sequences)
    num_tokens = prompt + sum(lengths) - len(lengths) * prompt
    own = [length - prompt for length in lengths]
    return _Bundle(sequences, max(num_tokens, ceil(sum(lengths) / KEYS_OF_A_TOKEN)), cost(prompt, own, is_shared=True))


def _balanced(bundles: Sequence[_Bundle], max_tokens: int, num_parts: int) -> list[list[_Bundle]] | None:
    """Put each bundle, costliest first, into the cheapest part with room. Return None if a bundle has no room."""
    parts: list[list[_Bundle]] = [[] for _ in range(num_parts)]
    tokens, costs = [0] * num_parts, [0.0] * num_parts
    for bundle in bundles:
        fitting = [i for i in range(num_parts) if not parts[i] or tokens[i] + bundle.num_tokens <= max_tokens]
        if not fitting:
            return None
        place = min(fitting, key=lambda i: costs[i])
        parts[place].append(bundle)
        tokens[place] += bundle.num_tokens
        costs[place] += bundle.cost
    return [part for part in parts if part]


def _place(sequence: TrainSequence) -> tuple[int, int]:
    return sequence.ordinal, sequence.sample_index
