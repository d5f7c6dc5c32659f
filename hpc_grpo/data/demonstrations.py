"""The SFT stream: prompts with the completion to imitate, by ordinal, as pure as the prompt stream."""

from __future__ import annotations

import numpy as np

from hpc_grpo.config import Config
from hpc_grpo.data.lengths import LengthRule, fitting_items
from hpc_grpo.data.sources import Items, completion_text
from hpc_grpo.data.stream import EpochOrder
from hpc_grpo.data.templates import PromptTemplate, Tokenizer, encode_completions
from hpc_grpo.types import Demonstration


class DemonstrationStream:
    """Demonstrations of `config.data.train`: the completion is `sft.completion_field` and an end token.

    Construction tokenizes every item once. Raises ConfigError for a missing or empty completion and, unless
    `data.drop_long_prompts`, for a prompt longer than `data.max_prompt_tokens` or a sequence longer than
    `train.max_tokens_per_microbatch`, which no microbatch could hold. `num_dropped` counts what was dropped.
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
        self._kept = fitting_items(fitting, self._num_tokens, whole_rule, drop)
        self.num_dropped = len(items) - len(self._kept)
        self._order = EpochOrder(len(self._kept), seed, config.data.shuffle)

    def __len__(self) -> int:
        """Demonstrations in one epoch."""
        return len(self._order)

    def epoch_of(self, ordinal: int) -> int:
        return self._order.epoch_of(ordinal)

    def demonstration(self, ordinal: int) -> Demonstration:
        number = int(self._kept[self._order.index_of(ordinal)])
        [prompt_ids] = self._prompt_ids([number])
        [completion_ids] = self._completion_ids([number])
        return Demonstration(
            ordinal=ordinal,
            epoch=self.epoch_of(ordinal),
            prompt_token_ids=tuple(prompt_ids),
            completion_token_ids=tuple(completion_ids),
        )

    def _num_prompt_tokens(self, numbers: list[int]) -> list[int]:
        return [len(ids) for ids in self._prompt_ids(numbers)]

    def _num_tokens(self, numbers: list[int]) -> list[int]:
        pairs = zip(self._prompt_ids(numbers), self._completion_ids(numbers), strict=True)
        return [len(prompt_ids) + len(completion_ids) for prompt_ids, completion_ids in pairs]

    def _prompt_ids(self, numbers: list[int]) -> list[list[int]]:
        return self._template.encode([self._template.render(self._items[number], number) for number in numbers])

    def _completion_ids(self, numbers: list[int]) -> list[list[int]]:
        return encode_completions(self._tokenizer, [self._completion(number) for number in numbers])

    def _completion(self, number: int) -> str:
        return completion_text(self._config, self._items[number], number)
