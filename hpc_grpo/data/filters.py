"""Choose the rows of a source that are asked, by the columns of its cache: split from eval, duplicates, lengths.

They are applied at every start and kept nowhere: a run that changes one of them tokenizes nothing anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_grpo.data.prompt_hash import held_out_below
from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class LengthRule:
    """At most `max_tokens` tokens for items of the data set `path`: `key` says so, and `remedy` how to allow more."""

    key: str
    max_tokens: int
    path: str
    remedy: str


def held_out(prompt_hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Tell which rows are kept for eval. It depends on the prompt alone: neither on other rows nor on their order."""
    return prompt_hashes < np.uint64(held_out_below(fraction))


def lowest(candidates: NDArray[np.int64], prompt_hashes: NDArray[np.uint64], most: int) -> NDArray[np.int64]:
    """Return at most `most` candidates, those with the lowest hashes: a sample that more rows change little."""
    return np.sort(candidates[np.argsort(prompt_hashes[candidates], kind="stable")[:most]])


def without_duplicates(
    candidates: NDArray[np.int64], prompt_hashes: NDArray[np.uint64], seen: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the candidates whose prompt neither `seen` nor an earlier candidate has, and all that is seen then."""
    hashes = prompt_hashes[candidates]
    unique, first = np.unique(hashes, return_index=True)
    new = first[~np.isin(unique, seen)]
    return candidates[np.sort(new)], np.union1d(seen, unique)


def fitting(
    candidates: NDArray[np.int64], num_tokens: NDArray[np.int32], rule: LengthRule, drop: bool
) -> NDArray[np.int64]:
    """Return the candidates that keep the rule, in their order. Raises ConfigError for a longer one, unless `drop`."""
    fits = num_tokens[candidates] <= rule.max_tokens
    if not drop and not fits.all():
        number = int(candidates[np.flatnonzero(~fits)[0]])
        raise ConfigError(
            f"Item {number} of {rule.path} (counted from 0) has {num_tokens[number]} tokens, more than "
            f"{rule.key} = {rule.max_tokens}. {rule.remedy}, or set data.drop_long_prompts = true to train without "
            f"such items."
        )
    if len(candidates) and not fits.any():
        raise ConfigError(
            f"All {len(candidates)} items of {rule.path} are longer than {rule.key} = {rule.max_tokens}; "
            f"dropping them leaves nothing. {rule.remedy}."
        )
    return candidates[fits]
