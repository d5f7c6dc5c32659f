"""Templates: turn an item into the prompt that the model sees, as text and as token ids.

`PromptTemplate` raises ConfigError if config and tokenizer contradict each other, and for an item whose prompt cannot
be rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from hpc_grpo.config import DataConfig, SourceConfig
from hpc_grpo.data.images import with_image_parts
from hpc_grpo.errors import ConfigError

_PLACEHOLDER = "{prompt}"

_R1_TASK = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think> <answer> answer here </answer>."
)
"""The prompt of DeepSeek-R1-Zero (arXiv:2501.12948, table 1)."""


class Tokenizer(Protocol):
    """The methods that we use of a transformers tokenizer, so that data and rewards need not import transformers."""

    chat_template: Any
    eos_token_id: int | None

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


@dataclass(frozen=True)
class PromptStyle:
    """The texts around a source's prompts. `template` is chat or plain; `chat_template` None is the tokenizer's."""

    template: str
    prompt_format: str
    system_prompt: str | None
    chat_template: str | None
    template_args: Mapping[str, Any]


def prompt_style(config: DataConfig, source: SourceConfig) -> PromptStyle:
    """Return the style of a source: its own keys, else those of `data`. Raises ConfigError for contradicting keys."""

    def chosen(key: str) -> Any:
        own = getattr(source, key)
        return getattr(config, key) if own is None else own

    template, prompt_format, system_prompt = chosen("template"), chosen("prompt_format"), chosen("system_prompt")
    if _PLACEHOLDER not in prompt_format:
        raise ConfigError(f"data.prompt_format = {prompt_format!r} must contain {_PLACEHOLDER}.")
    if chosen("preprocessing") == "deepseek":
        if prompt_format != _PLACEHOLDER or system_prompt is not None:
            raise ConfigError(
                "data.preprocessing = deepseek brings its own prompt: leave data.prompt_format and data.system_prompt "
                "unset, or set preprocessing to generic."
            )
        if template == "plain":
            prompt_format = f"{_R1_TASK} User: {_PLACEHOLDER}. Assistant:"
        else:
            system_prompt = _R1_TASK
    chat_template = None
    if template not in ("chat", "plain"):
        try:
            template, chat_template = "chat", Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.template = {template} cannot be read: {error}. Give a Jinja file.") from error
    return PromptStyle(template, prompt_format, system_prompt, chat_template, chosen("template_args"))


def source_text(source: SourceConfig, item: Mapping[str, Any]) -> Any:
    """Return an item's prompt. If its source has no prompt column, return the item as JSON."""
    if source.prompt_field is None:
        return json.dumps(item, sort_keys=True, default=str)
    return item[source.prompt_field]


def check_text(prompt: Any, source: SourceConfig, number: int) -> str:
    """Return the prompt of item `number`. Raises ConfigError if it is no text, or empty."""
    if not isinstance(prompt, str):
        fix = "Make it text, or set prompt_field to another column"
        if isinstance(prompt, list):
            fix = f"For chat messages set prompt_field=null messages_field={source.prompt_field}"
        raise ConfigError(
            f"Item {number} of {source.path}: {source.prompt_field!r} must be text, not {type(prompt).__name__}. {fix}."
        )
    check_not_empty(prompt, source.path, number)
    return prompt


def check_not_empty(prompt: str, path: str, number: int) -> None:
    if not prompt.strip():
        raise ConfigError(
            f"Item {number} of {path} (counted from 0) has an empty prompt: there is no token to continue. Remove "
            f"the item, or give it text."
        )


def check_characters(text: str, path: str, number: int) -> None:
    """Raise ConfigError if `text` (item `number` of `path`) holds half a surrogate pair, as JSON allows (\\ud83d)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Item {number} of {path} (counted from 0) holds {text[error.start : error.end]!r}, half of a character, "
            f"which no tokenizer takes. Mend or remove the item."
        ) from error


def check_messages(value: Any, source: SourceConfig, number: int) -> list[Mapping[str, Any]]:
    """Return the chat messages of item `number`, which may be JSON text. Raises ConfigError if they are not valid."""
    where = f"Item {number} of {source.path}: {source.messages_field!r}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where} is text, but not a list of messages in JSON: {value!r:.200} ({error})."
            ) from error
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a list of messages with at least one, not {value!r:.200}.")
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ConfigError(f"{where}: a message must have role and content, not {message!r:.200}.")
    if value[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where} ends with a message of the assistant; a prompt must end before it. "
            f"Move that message to a column of its own."
        )
    if isinstance(value[-1]["content"], str):
        check_not_empty(value[-1]["content"], source.path, number)
    elif not value[-1]["content"]:
        raise ConfigError(f"{where}: the last message must have content, not {value[-1]['content']!r}.")
    return list(value)


def as_text(content: Any) -> Any:
    """Return a message's content as one text if its parts are texts, else unchanged."""
    parts = content if isinstance(content, list) else [None]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(parts) else content


class ChatTemplateError(ValueError):
    """The chat template or the tokenizer refuses messages."""


def check_template(style: PromptStyle, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the style needs a chat template and the tokenizer has none, or the keys contradict."""
    if style.template == "plain" and style.system_prompt is not None:
        raise ConfigError(
            "data.system_prompt needs data.template = chat. With plain, write it into data.prompt_format."
        )
    if style.template == "chat" and not (style.chat_template or tokenizer.chat_template):
        raise ConfigError(
            "data.template = chat, but the model's tokenizer has no chat template. "
            "Set data.template to plain or to a Jinja file, or use a tokenizer with a chat template."
        )


def opening(style: PromptStyle, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with `prompt_format` around a lone user message, and the system message unless they have one."""
    if len(messages) == 1 and messages[0]["role"] == "user" and style.prompt_format != _PLACEHOLDER:
        # Not str.format: prompts and formats are full of LaTeX braces.
        content = style.prompt_format.replace(_PLACEHOLDER, messages[0]["content"])
        messages = [{**messages[0], "content": content}]
    if style.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": style.system_prompt}, *messages]


def render_chat(tokenizer: Tokenizer, style: PromptStyle, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """Render the text that the model continues. Raises ChatTemplateError if the template refuses the messages."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                chat_template=style.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **{**style.template_args, **more},
            )
        )
    except Exception as error:
        # A chat template is the model author's program. It may raise anything, such as a refused role.
        raise ChatTemplateError(f"the tokenizer's chat template refuses it: {error}") from error


def encode_prompts(tokenizer: Tokenizer, style: PromptStyle, texts: Sequence[str]) -> list[list[int]]:
    if style.template == "chat":
        # The template wrote the special tokens already.
        return _token_ids(tokenizer, texts, add_special_tokens=False)
    encoded = _token_ids(tokenizer, texts, add_special_tokens=True)
    # Some tokenizers append an end token. A prompt that ends with one has no continuation.
    end = tokenizer.eos_token_id
    return [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in encoded]


class PromptTemplate:
    """Renders and tokenizes the prompts of one source."""

    def __init__(self, config: DataConfig, source: SourceConfig, tokenizer: Tokenizer) -> None:
        self._style = style = prompt_style(config, source)
        self._source, self._tokenizer = source, tokenizer
        check_template(style, tokenizer)
        if source.messages_field is not None and style.template == "plain":
            raise ConfigError("messages_field needs data.template = chat. With plain, use prompt_field.")
        if source.messages_field is not None and style.prompt_format != _PLACEHOLDER:
            raise ConfigError("data.prompt_format applies to prompt_field; with messages_field leave it unset.")

    def render(self, item: Mapping[str, Any], number: int, num_images: int | None = None) -> str:
        """Render the model's input text for `item`, which is item `number` of its data set.

        `num_images` is the number of the item's images, None in a run without images. Raises ImageError if the prompt
        has another number of places for images.
        """
        messages = opening(self._style, self.messages(item, number))
        if num_images is not None:
            messages = with_image_parts(messages, num_images)
        if self._style.template == "plain":
            text = str(messages[0]["content"])
        else:
            try:
                text = render_chat(self._tokenizer, self._style, messages)
            except ChatTemplateError as error:
                raise ConfigError(f"Item {number} of {self._source.path}: {error}") from error
        check_characters(text, self._source.path, number)
        return text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_prompts(self._tokenizer, self._style, texts)

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the chat template writes the text of a part. Others write the part as Python or JSON."""
        text = r"a\b"  # its backslash is doubled in Python and JSON
        asked = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        with suppress(ChatTemplateError):
            return text in render_chat(self._tokenizer, self._style, asked)
        return False

    def messages(self, item: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
        """Return the chat messages of an item, without what `opening` adds."""
        field = self._source.messages_field
        if field is not None:
            messages = check_messages(item[field], self._source, number)
            joined: list[Mapping[str, Any]] = [{**own, "content": as_text(own["content"])} for own in messages]
            return messages if joined == messages or self._takes_parts else joined
        return [{"role": "user", "content": check_text(source_text(self._source, item), self._source, number)}]


def encode_completions(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize completions to imitate, with an end token after each. Raises ConfigError if there is no end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("The model's tokenizer has no eos_token; completions to imitate need one to end with.")
    return [[*ids, end] for ids in _token_ids(tokenizer, texts, add_special_tokens=False)]


def _token_ids(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    return ids
