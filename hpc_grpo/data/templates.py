"""Templates: from an item to the prompt that the model sees, as text and as token ids.

Raises ConfigError at construction when config and tokenizer do not fit together, and for an item whose prompt cannot be
rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hpc_grpo.config import DataConfig, DatasetConfig
from hpc_grpo.data.sources import check_characters
from hpc_grpo.errors import ConfigError

_PLACEHOLDER = "{prompt}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used, so that neither data nor rewards import transformers."""

    chat_template: Any
    eos_token_id: int | None

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


class PromptTemplate:
    """Renders and tokenizes the prompts of one data set."""

    def __init__(self, config: DataConfig, dataset: DatasetConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._dataset = dataset
        self._tokenizer = tokenizer
        if _PLACEHOLDER not in config.prompt_format:
            raise ConfigError(f"data.prompt_format = {config.prompt_format!r} must contain {_PLACEHOLDER}.")
        if config.template == "plain":
            if config.system_prompt is not None:
                raise ConfigError(
                    "data.system_prompt needs data.template = chat. With plain, write it into data.prompt_format."
                )
            if dataset.messages_field is not None:
                raise ConfigError("messages_field needs data.template = chat. With plain, use prompt_field.")
            return
        if not tokenizer.chat_template:
            raise ConfigError(
                "data.template = chat, but the model's tokenizer has no chat template. "
                "Set data.template = plain, or use a tokenizer with one."
            )
        if dataset.messages_field is not None and config.prompt_format != _PLACEHOLDER:
            raise ConfigError("data.prompt_format applies to prompt_field; with messages_field leave it unset.")

    def render(self, item: Mapping[str, Any], number: int) -> str:
        """Render the text that the model is given for `item`, which is number `number` of its data set."""
        text = self._formatted(item, number) if self._config.template == "plain" else self._chat(item, number)
        check_characters(text, self._dataset.path, number)
        return text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._config.template == "chat":
            # The template wrote the special tokens already.
            return _token_ids(self._tokenizer, texts, add_special_tokens=False)
        encoded = _token_ids(self._tokenizer, texts, add_special_tokens=True)
        # Some tokenizers also append an end token; a prompt that ends with it has no continuation.
        end = self._tokenizer.eos_token_id
        return [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in encoded]

    def _chat(self, item: Mapping[str, Any], number: int) -> str:
        messages = self._messages(item, number)
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # A template is a program of the model's author: it raises what it likes, such as a refused role.
            raise ConfigError(
                f"Item {number} of {self._dataset.path}: the tokenizer's chat template refuses it: {error}"
            ) from error
        return str(text)

    def _formatted(self, item: Mapping[str, Any], number: int) -> str:
        prompt = item[self._dataset.prompt_field]
        if not isinstance(prompt, str):
            raise ConfigError(
                f"Item {number} of {self._dataset.path}: {self._dataset.prompt_field!r} must be text, "
                f"not {type(prompt).__name__}. For a list of chat messages set messages_field."
            )
        # Not str.format: prompts and formats are full of LaTeX braces.
        return self._config.prompt_format.replace(_PLACEHOLDER, prompt)

    def _messages(self, item: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
        """Chat messages of an item. Its own system message wins over `data.system_prompt`."""
        field = self._dataset.messages_field
        if field is None:
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": self._formatted(item, number)}]
        else:
            messages = self._checked_messages(item[field], number)
        if self._config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        return messages

    def _checked_messages(self, value: Any, number: int) -> list[Mapping[str, Any]]:
        where = f"Item {number} of {self._dataset.path}: {self._dataset.messages_field!r}"
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise ConfigError(f"{where} must be a list of messages with at least one, not {value!r}.")
        for message in value:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ConfigError(f"{where}: a message must have role and content, not {message!r}.")
        if value[-1]["role"] == "assistant":
            raise ConfigError(
                f"{where} ends with a message of the assistant; a prompt must end before it. "
                f"Move that message to a column of its own."
            )
        return list(value)


def encode_completions(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize completions to imitate, an end token after each. Raises ConfigError when the tokenizer has none."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("The model's tokenizer has no eos_token; completions to imitate need one to end with.")
    return [[*ids, end] for ids in _token_ids(tokenizer, texts, add_special_tokens=False)]


def _token_ids(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    return ids
