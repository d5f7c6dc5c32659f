"""The streams a run trains on, prompts or demonstrations: pure functions of (seed, epoch, ordinal).

A stream keeps no cursor: which ordinals were used is the caller's to remember, so a resumed run needs nothing from
here. Construction tokenizes every item once, so that one that does not fit is found now and not at step 1000.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_grpo.config import Config
from hpc_grpo.data.seeds import epoch_permutation
from hpc_grpo.data.sources import Items, completion_text
from hpc_grpo.data.templates import PromptTemplate, Tokenizer, encode_completions
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import Demonstration, Prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_BATCH_ITEMS = 1000
"""Items tokenized in one call: enough for the tokenizer's threads, few enough to stay small in memory."""

_NUM_CACHED_EPOCHS = 2
"""Engines that run ahead straddle at most the end of one epoch and the start of the next."""


class EpochOrder:
    """Maps ordinals, which count from 0 over the whole run, to the `items` (their numbers) of an epoch."""

    def __init__(self, items: NDArray[np.int64], seed: int, shuffle: bool) -> None:
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def find(self, ordinal: int) -> tuple[int, int]:
        """Return the epoch and the number of the item at `ordinal`. Raises ValueError for a negative one."""
        if ordinal < 0:
            raise ValueError(f"ordinal = {ordinal}: ordinals count from 0.")
        epoch, place = divmod(ordinal, len(self._items))
        return epoch, int(self._items[self._permutation(epoch)[place] if self._shuffle else place])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            while len(self._permutations) >= _NUM_CACHED_EPOCHS:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = epoch_permutation(len(self._items), self._seed, epoch)
        return self._permutations[epoch]


class PromptStream:
    """Prompts of `data.train` by ordinal, or with `for_eval` those of `data.eval`, which are never shuffled.

    Raises ConfigError for a prompt longer than `data.max_prompt_tokens`, unless `data.drop_long_prompts`;
    then `num_dropped` counts them, and it is an error only when nothing is left.
    """

    def __init__(
        self, config: Config, items: Items, tokenizer: Tokenizer, seed: int, *, for_eval: bool = False
    ) -> None:
        self._dataset = config.data.eval if for_eval and config.data.eval else config.data.train
        self._items = items
        self._template = PromptTemplate(config.data, self._dataset, tokenizer)
        rule = LengthRule("data.max_prompt_tokens", config.data.max_prompt_tokens, self._dataset.path)
        every_item = np.arange(len(items), dtype=np.int64)
        kept = fitting_items(every_item, self._num_tokens, rule, config.data.drop_long_prompts)
        self.num_dropped = len(items) - len(kept)
        self._order = EpochOrder(kept, seed, config.data.shuffle and not for_eval)

    def __len__(self) -> int:
        return len(self._order)

    def prompt(self, ordinal: int) -> Prompt:
        epoch, number = self._order.find(ordinal)
        item, answer_field = self._items[number], self._dataset.answer_field
        text = self._template.render(item, number)
        [token_ids] = self._template.encode([text])
        fields = dict(item) if answer_field is None else {**item, "answer": item[answer_field]}
        return Prompt(ordinal, epoch, tuple(token_ids), text, fields)

    def _num_tokens(self, numbers: list[int]) -> list[int]:
        texts = [self._template.render(self._items[number], number) for number in numbers]
        return [len(ids) for ids in self._template.encode(texts)]


class DemonstrationStream:
    """Demonstrations of `config.data.train`: the completion is `sft.completion_field` and an end token.

    Raises ConfigError for a missing or empty completion and, unless `data.drop_long_prompts`, for a prompt longer than
    `data.max_prompt_tokens` or a sequence longer than `train.max_tokens_per_microbatch`, which no microbatch could
    hold. `num_dropped` counts what was dropped.
    """

    def __init__(self, config: Config, items: Items, tokenizer: Tokenizer, seed: int) -> None:
        self._items = items
        self._tokenizer = tokenizer
        self._config = config
        self._template = PromptTemplate(config.data, config.data.train, tokenizer)
        path, drop = config.data.train.path, config.data.drop_long_prompts
        prompt_rule = LengthRule("data.max_prompt_tokens", config.data.max_prompt_tokens, path)
        whole_rule = LengthRule("train.max_tokens_per_microbatch", config.train.max_tokens_per_microbatch, path)
        every_item = np.arange(len(items), dtype=np.int64)
        fitting = fitting_items(every_item, self._num_prompt_tokens, prompt_rule, drop)
        kept = fitting_items(fitting, self._num_tokens, whole_rule, drop)
        self.num_dropped = len(items) - len(kept)
        self._order = EpochOrder(kept, seed, config.data.shuffle)

    def __len__(self) -> int:
        return len(self._order)

    def demonstration(self, ordinal: int) -> Demonstration:
        epoch, number = self._order.find(ordinal)
        [prompt_ids] = self._prompt_ids([number])
        [completion_ids] = self._completion_ids([number])
        return Demonstration(ordinal, epoch, tuple(prompt_ids), tuple(completion_ids))

    def _num_prompt_tokens(self, numbers: list[int]) -> list[int]:
        return [len(ids) for ids in self._prompt_ids(numbers)]

    def _num_tokens(self, numbers: list[int]) -> list[int]:
        pairs = zip(self._prompt_ids(numbers), self._completion_ids(numbers), strict=True)
        return [len(prompt_ids) + len(completion_ids) for prompt_ids, completion_ids in pairs]

    def _prompt_ids(self, numbers: list[int]) -> list[list[int]]:
        return self._template.encode([self._template.render(self._items[number], number) for number in numbers])

    def _completion_ids(self, numbers: list[int]) -> list[list[int]]:
        texts = [completion_text(self._config, self._items[number], number) for number in numbers]
        return encode_completions(self._tokenizer, texts)


@dataclass(frozen=True)
class LengthRule:
    """At most `max_tokens` tokens, as the config key `key` says, for items of the data set `path`."""

    key: str
    max_tokens: int
    path: str


def fitting_items(
    candidates: NDArray[np.int64], num_tokens: Callable[[list[int]], list[int]], rule: LengthRule, drop: bool
) -> NDArray[np.int64]:
    """Return the candidates (item numbers) that keep the rule, in their order.

    `num_tokens` gives the lengths of some items. With `drop`, the others are counted in the log. Raises
    ConfigError for the first that is empty or too long, or when dropping leaves nothing.
    """
    kept: list[int] = []
    for start in range(0, len(candidates), _BATCH_ITEMS):
        numbers = [int(number) for number in candidates[start : start + _BATCH_ITEMS]]
        for number, length in zip(numbers, num_tokens(numbers), strict=True):
            if length == 0:
                raise ConfigError(
                    f"Item {number} of {rule.path} (counted from 0) has an empty prompt: there is no token to go on "
                    f"from. Remove the item, or give it text."
                )
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
        counts = f"{num_dropped} of {len(candidates)} items of {rule.path}"
        _log.warning("Dropped %s: longer than %s = %d tokens.", counts, rule.key, rule.max_tokens)
    return np.asarray(kept, dtype=np.int64)
