"""The prompt stream: a pure function of (seed, epoch, ordinal).

Consumes items and a tokenizer; produces the `Prompt` of any ordinal, in any order, as often as asked. It
keeps no cursor: which ordinals were used is the caller's to remember, so a resumed run needs nothing from
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_grpo.config import Config, DatasetConfig
from hpc_grpo.data.lengths import LengthRule, fitting_items
from hpc_grpo.data.seeds import epoch_permutation
from hpc_grpo.data.sources import Item, Items
from hpc_grpo.data.templates import PromptTemplate, Tokenizer
from hpc_grpo.types import Prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUM_CACHED_EPOCHS = 2
"""Engines that run ahead straddle at most the end of one epoch and the start of the next."""


class EpochOrder:
    """Which of `num_items` items an ordinal stands for. Ordinals count from 0 over the whole run."""

    def __init__(self, num_items: int, seed: int, shuffle: bool) -> None:
        self._num_items = num_items
        self._seed = seed
        self._shuffle = shuffle
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._num_items

    def epoch_of(self, ordinal: int) -> int:
        if ordinal < 0:
            raise ValueError(f"ordinal = {ordinal}: ordinals count from 0.")
        return ordinal // self._num_items

    def index_of(self, ordinal: int) -> int:
        epoch, place = self.epoch_of(ordinal), ordinal % self._num_items
        return int(self._permutation(epoch)[place]) if self._shuffle else place

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            while len(self._permutations) >= _NUM_CACHED_EPOCHS:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = epoch_permutation(self._num_items, self._seed, epoch)
        return self._permutations[epoch]


class PromptStream:
    """Prompts of a data set, by ordinal.

    `dataset` is `config.data.train` unless given, `shuffle` is `config.data.shuffle` unless given: eval
    passes its own data set and False. Construction renders and tokenizes every item once, so that a prompt
    that does not fit is found now and not at step 1000; token ids are not kept, they are made again when
    asked for.

    Raises ConfigError for a prompt longer than `data.max_prompt_tokens`, unless `data.drop_long_prompts`;
    then `num_dropped` counts them, and it is an error only when nothing is left.
    """

    def __init__(
        self,
        config: Config,
        items: Items,
        tokenizer: Tokenizer,
        seed: int,
        *,
        dataset: DatasetConfig | None = None,
        shuffle: bool | None = None,
    ) -> None:
        self._dataset = dataset or config.data.train
        self._items = items
        self._template = PromptTemplate(config.data, self._dataset, tokenizer)
        rule = LengthRule("data.max_prompt_tokens", config.data.max_prompt_tokens, self._dataset.path)
        every_item = np.arange(len(items), dtype=np.int64)
        self._kept = fitting_items(every_item, self._num_tokens, rule, config.data.drop_long_prompts)
        self.num_dropped = len(items) - len(self._kept)
        self._order = EpochOrder(len(self._kept), seed, config.data.shuffle if shuffle is None else shuffle)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._order)

    def epoch_of(self, ordinal: int) -> int:
        return self._order.epoch_of(ordinal)

    def prompt(self, ordinal: int) -> Prompt:
        number = int(self._kept[self._order.index_of(ordinal)])
        item = self._items[number]
        text = self._template.render(item, number)
        [token_ids] = self._template.encode([text])
        return Prompt(
            ordinal=ordinal,
            epoch=self.epoch_of(ordinal),
            token_ids=tuple(token_ids),
            text=text,
            fields=self._fields(item),
        )

    def _fields(self, item: Item) -> Item:
        answer_field = self._dataset.answer_field
        return dict(item) if answer_field is None else {**item, "answer": item[answer_field]}

    def _num_tokens(self, numbers: list[int]) -> list[int]:
        texts = [self._template.render(self._items[number], number) for number in numbers]
        return [len(ids) for ids in self._template.encode(texts)]
