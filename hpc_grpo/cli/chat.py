"""The conversation of `hpc-grpo model sample --interactive`: prompts from the terminal, to each model in this process.

The template, the system prompt and the sampling are those of the config. transformers generates: no Ray, no engines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Any

from hpc_grpo.cli.options import echo
from hpc_grpo.config import Config
from hpc_grpo.data.templates import PromptTemplate, prompt_style
from hpc_grpo.data.tokenizer import load_tokenizer, stop_token_ids
from hpc_grpo.run.adapter import with_model
from hpc_grpo.system.hugging_face import find_model

NEW = "/new"
_MESSAGES = "messages"


class Chat:
    """A model and its conversation so far. Without a chat template, the model sees each prompt alone.

    Prompts have the template of the config's first eval source. Raises ConfigError if the model cannot be loaded, or
    its tokenizer does not fit the template.
    """

    def __init__(self, config: Config) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._config = config
        self._tokenizer = load_tokenizer(config)
        self._end = stop_token_ids(config, self._tokenizer)
        (_, self._source), *_ = config.data.sources(for_eval=True)
        self._style = prompt_style(config.data, self._source)
        self._is_plain = self._style.template == "plain"
        fields = (
            {"prompt_field": "prompt"} if self._is_plain else {"messages_field": _MESSAGES, "prompt_format": "{prompt}"}
        )
        self._template = PromptTemplate(config.data, self._source.model_copy(update=fields), self._tokenizer)
        on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
        dtype = getattr(torch, config.engine.dtype or config.model.dtype)
        folder = find_model(config.model.path)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        if config.model.adapter is not None:
            model.load_adapter(config.model.adapter)
        self._model = model.to("cuda" if on_gpu else "cpu").eval()
        self._messages: list[dict[str, str]] = []

    def say(self, prompt: str, show: Callable[[str], None]) -> str:
        """Return the answer to `prompt`; `show` gets it piece by piece. An interrupted answer is not remembered."""
        import torch
        from transformers import TextStreamer

        class Shown(TextStreamer):  # type: ignore[misc]
            """Passes each complete word to `show` when the model has written it."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        said = self._style.prompt_format.replace("{prompt}", prompt)
        asked = [*self._messages, {"role": "user", "content": said}]
        token_ids = self._encode({"prompt": prompt}) if self._is_plain else self._encode_end(asked)
        rollout, settings = self._config.rollout, self._config.eval_settings("")
        sampling: dict[str, Any] = {"do_sample": False}
        if settings.temperature > 0.0:
            sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
        tokens = torch.tensor([token_ids], device=self._model.device)
        with torch.no_grad():
            found = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=rollout.max_new_tokens,
                min_new_tokens=rollout.min_new_tokens,
                stop_strings=rollout.stop or None,
                tokenizer=self._tokenizer,
                eos_token_id=list(self._end),
                pad_token_id=self._end[0],
                streamer=Shown(self._tokenizer, skip_prompt=True, skip_special_tokens=True),
                **sampling,
            )
        answer = str(self._tokenizer.decode(found[0, len(token_ids) :], skip_special_tokens=True)).strip()
        if not self._is_plain:
            self._messages = [*asked, {"role": "assistant", "content": answer}]
        return answer

    def forget(self) -> None:
        """Begin a new conversation."""
        self._messages = []

    def _encode(self, item: dict[str, Any]) -> list[int]:
        (token_ids,) = self._template.encode([self._template.render(item, 0)])
        return token_ids

    def _encode_end(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation. Drops its oldest turns if all turns exceed the context."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        while True:
            token_ids = self._encode({_MESSAGES: messages})
            if limit is None or len(messages) < 3 or len(token_ids) + self._config.rollout.max_new_tokens <= limit:
                return token_ids
            messages = messages[2:]


def converse(config: Config, models: Mapping[str, str], chat_of: Callable[[Config], Chat] = Chat) -> None:
    """Answer prompts by each of `models` (name -> path) until the input ends. Raises ConfigError like `Chat`."""
    with redirect_stdout(sys.stderr):  # libraries print to stdout when they are imported
        chats = {name: chat_of(with_model(config, path)) for name, path in models.items()}
    echo(f"Each line is a prompt; {NEW} begins a new conversation, Ctrl+C stops an answer, Ctrl+D ends.", err=True)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - gives input() its editing and history
    with suppress(EOFError, KeyboardInterrupt):  # Ctrl+C at the prompt also ends the conversation
        while True:
            prompt = input("> " if is_terminal else "").strip()
            for name, chat in chats.items() if prompt else ():
                if prompt == NEW:
                    chat.forget()
                    continue
                echo(f"[{name}] " if len(chats) > 1 else "", nl=False)
                with suppress(KeyboardInterrupt):
                    chat.say(prompt, partial(echo, nl=False))
                echo("")
