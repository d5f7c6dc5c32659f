"""Which items fit a length limit: found before the first step, because step 1000 is too late for an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_BATCH_ITEMS = 1000
"""Items tokenized in one call: enough for the tokenizer's threads, few enough to stay small in memory."""


@dataclass(frozen=True)
class LengthRule:
    """At most `max_tokens` tokens, as the config key `key` says, for items of the data set `path`."""

    key: str
    max_tokens: int
    path: str


def fitting_items(
    candidates: NDArray[np.int64], num_tokens: Callable[[list[int]], list[int]], rule: LengthRule, drop: bool
) -> NDArray[np.int64]:
    """The candidates (item numbers) that keep the rule, in their order.

    `num_tokens` gives the lengths of some items. With `drop`, the others are counted in the log. Raises
    ConfigError for the first that is too long, or when dropping leaves nothing.
    """
    kept: list[int] = []
    for start in range(0, len(candidates), _BATCH_ITEMS):
        numbers = [int(number) for number in candidates[start : start + _BATCH_ITEMS]]
        for number, length in zip(numbers, num_tokens(numbers), strict=True):
            if length <= rule.max_tokens:
                kept.append(number)
            elif not drop:
                raise ConfigError(
                    f"Item {number} of {rule.path} (counted from 0) has {length} tokens, more than "
                    f"{rule.key} = {rule.max_tokens}. Raise {rule.key}, or set data.drop_long_prompts = true "
                    f"to train without such items."
                )
    num_dropped = len(candidates) - len(kept)
    if not kept:
        raise ConfigError(
            f"All {num_dropped} items of {rule.path} are longer than {rule.key} = {rule.max_tokens}; "
            f"dropping them leaves nothing. Raise {rule.key}."
        )
    if num_dropped:
        _log.warning(
            "Dropped %d of %d items of %s: longer than %s = %d tokens.",
            num_dropped,
            len(candidates),
            rule.path,
            rule.key,
            rule.max_tokens,
        )
    return np.asarray(kept, dtype=np.int64)
