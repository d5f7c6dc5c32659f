"""Token ids of a conversation. The model's tokens stay as sampled; observations are appended as ids.

Runs in the engine's process, between two turns of an episode. Then only the last row below is encoded:

    prompt   [user] Guess my number. [end] [assistant]
    sampled                                            Is it 5? [end]
    context                                                           [user] No. [end] [assistant]

The context is the text that the chat template adds after the answer. Some templates rewrite history, for example they
cut reasoning from earlier turns. The conversation then restarts: the context is a complete new prompt.

Text of messages never becomes a special token (`Pieces`).
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

from hpc_grpo.data.templates import (
    ChatTemplateError,
    PromptStyle,
    Tokenizer,
    check_template,
    encode_prompts,
    opening,
    render_chat,
)
from hpc_grpo.episodes import Message
from hpc_grpo.errors import ConfigError

_TOOLS = """You can call functions. Each line between these tags is the JSON signature of one:
<tools>
{signatures}
</tools>

To call a function, write its name and its arguments as JSON between these tags, a pair of tags for each call:
<tool_call>
{"name": "a name", "arguments": {"an argument": "its value"}}
</tool_call>"""
"""The Hermes form, which vLLM's parser `hermes` reads, for templates that ignore tools."""


class Dialogue:
    """The template of one source, checked against its tokenizer. Makes conversations.

    With the style `plain`, a context is the text of the messages without separators. `prompt_format` is applied to a
    single first message, as to a prompt of a data set. No message can write a special token. Only messages of the
    assistant can write the template's other tokens, such as `<tool_call>`: they are examples for the model.

    Raises ConfigError if template and tokenizer cannot make contexts.
    """

    def __init__(self, tokenizer: Tokenizer, style: PromptStyle) -> None:
        check_template(style, tokenizer)
        self.tokenizer, self.style = tokenizer, style
        self.is_plain = style.template == "plain"
        template = "" if self.is_plain else style.chat_template or tokenizer.chat_template
        self.pieces = Pieces(tokenizer, "".join(template.values()) if isinstance(template, Mapping) else str(template))
        self.complaint = functools.cache(self._complaint)
        self._start: list[int] = []
        if self.is_plain:
            with_start, bare = encode_prompts(tokenizer, style, ["x"])[0], tokenizer(["x"], add_special_tokens=False)
            self._start = with_start[: len(with_start) - len(bare["input_ids"][0])]
        if complaint := self._complaint_of_joins("Is it 5?", "No.") if self.is_plain else self.complaint("user"):
            raise ConfigError(complaint)

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """Begin an episode. Raises ValueError for refused messages, and ConfigError for tools under `plain`."""
        if not messages:
            raise ChatTemplateError("an episode begins with a message, and the environment gave none")
        asked = self.pieces.hide(messages)
        if self.is_plain:
            asked = [{"role": "user", "content": self.render(asked)}]
            if tools:
                raise ConfigError(
                    "An environment with tools needs data.template = chat. With plain, describe the tools in its first "
                    "message, and leave its `tools` empty."
                )
        asked = self._with_calls(opening(self.style, asked))
        shown = [self.pieces.hide_in(tool) for tool in tools]
        if shown and self.render(asked, shown) == self.render(asked, []):
            asked, shown = self._with_tools(asked, shown), []
        return Conversation(self, asked, shown)

    def _with_calls(self, messages: list[Message]) -> list[Message]:
        """Write the `tool_calls` of messages into their content if the template does not show them."""
        named = {"function": {"name": self.pieces.end, "arguments": {}}}
        probe, written = [*messages], [*messages]
        for at, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                probe[at] = {**message, "tool_calls": [{**call, **named} for call in calls]}
                texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
                shown = "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
                written[at] = {**message, "content": (message["content"] or "") + shown}
        return messages if probe == messages or self.pieces.end in self.render(probe) else written

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the messages and the beginning of the next answer; `plain` has no such beginning."""
        if self.is_plain:
            return "".join(message["content"] for message in messages)
        return render_chat(self.tokenizer, self.style, messages, **({"tools": tools} if tools else {}))

    def _with_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Write the tools into the system message, or into the next message if the template refuses the system's."""
        block = _TOOLS.replace("{signatures}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages[0]["role"] == "system":
            system, *others = messages
            block = f"{system['content']}\n\n{block}"
        else:
            system, others = {"role": "system"}, [*messages]
        shown = [{**system, "content": block}, *others]
        try:
            self.render(shown)
        except ChatTemplateError:
            if others:
                return [{**others[0], "content": f"{block}\n\n{others[0]['content']}"}, *others[1:]]
        return shown

    def told(self, messages: Sequence[Message]) -> list[Message]:
        """Return the environment's messages. Join them into one user message if the template has no role `tool`."""
        if not (any(message["role"] == "tool" for message in messages) and self.complaint("tool")):
            return list(messages)
        around = {"tool": "<tool_response>\n{}\n</tool_response>"}
        texts = [around.get(message["role"], "{}").replace("{}", message["content"]) for message in messages]
        return [{"role": "user", "content": "\n".join(texts)}]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a complete prompt. The ids are those of `PromptTemplate`, unless the text has marks of `Pieces`."""
        if self.pieces.nonce in text:
            return self._start + self.pieces.encode(text)
        return encode_prompts(self.tokenizer, self.style, [text])[0]

    def text_of(self, sampled: Sequence[int]) -> str:
        """Return the text of the model's tokens, without the end token."""
        return self.decode(self.pieces.without_end(sampled))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _complaint(self, role: str) -> str:
        """Return why no message of `role` can follow an answer of the model; "" if one can."""
        if self.is_plain:
            return ""
        asked: list[Message] = [{"role": "user", "content": "Guess."}]
        opened, told = opening(self.style, asked), f"{self.pieces.nonce}b"
        turn = [{"role": "assistant", "content": f"Is it 5?{self.pieces.end}"}, {"role": role, "content": told}]
        text = ""
        for shown, messages in (("user", asked), ("system", opened), (role, [*opened, *turn])):
            try:
                text = self.render(messages)
            except ChatTemplateError as error:
                fix = "Unset data.system_prompt, or give" if shown == "system" and self.style.system_prompt else "Give"
                return (
                    f"An environment needs messages of the role {shown}, and {error}. {fix} another template "
                    f"(data.template)."
                )
        before, end, after = text.rpartition(self.pieces.end)
        if not end or told not in after:
            missing = f"an environment's messages of the role {role}" if end else "the model's answers"
            return f"The chat template leaves out {missing}. Give another template (data.template)."
        return self._complaint_of_joins(before, after.replace(told, "No."))

    def _complaint_of_joins(self, before: str, after: str) -> str:
        """Return an error text if tokenizing a text in two pieces changes it, else "". Some tokenizers add a space."""
        apart = self.decode([*self.encode_prompt(before), *self.pieces.encode(after)])
        if apart == (joined := self.decode(self.encode_prompt(before + after))):
            return ""
        return (
            f"The tokenizer changes a text that continues other text: {apart!r} instead of {joined!r}, so an "
            f"observation cannot be appended. Set `legacy` to false in its tokenizer_config.json, or `prepend_scheme` "
            f'to "first" and `add_prefix_space` to false in its tokenizer.json.'
        )


class Conversation:
    """One episode's messages and token ids.

    `prompt` is the model's complete input for its next turn. `context_ids` are the new end of `prompt`. If the
    conversation `starts_anew`, they are all of `prompt`. `num_first` is the number of tokens of the first prompt.
    """

    def __init__(self, dialogue: Dialogue, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._dialogue, self._messages, self._tools = dialogue, messages, tools
        self._text = dialogue.render(messages, tools)
        self.prompt = self.context_ids = dialogue.encode_prompt(self._text)
        self.num_first, self.starts_anew = len(self.prompt), True

    def go_on(self, sampled: Sequence[int], messages: Sequence[Message]) -> None:
        """Append the model's answer and the next messages.

        Raises ValueError, and changes nothing, for messages that the template or the tokenizer refuses or omits.
        """
        pieces = self._dialogue.pieces
        answer = pieces.hide_written(self._dialogue.text_of(sampled), pieces.without_end(sampled))
        messages = self._dialogue.told(messages)
        told = pieces.hide(messages)
        for complaint in filter(None, (self._dialogue.complaint(message["role"]) for message in messages)):
            raise ChatTemplateError(complaint)
        # After the mark, the template writes its end of an answer.
        before, end, after = self._render(answer + pieces.end, told).rpartition(pieces.end)
        written = self._text + answer
        # Templates trim white space.
        is_same = before == written or "".join(before.split()) == "".join(written.split())
        tail = self._encode_after(sampled, after) if end and is_same else None
        if tail is not None:
            text, prompt = before + after, [*self.prompt, *sampled, *tail]
        else:
            text = self._render(answer, told)
            prompt = self._dialogue.encode_prompt(text)
        self._messages = [*self._messages, {"role": "assistant", "content": answer}, *told]
        self._text, self.prompt = text, prompt
        self.context_ids, self.starts_anew = (prompt, True) if tail is None else (tail, False)

    def _render(self, answer: str, told: Sequence[Message]) -> str:
        return self._dialogue.render([*self._messages, {"role": "assistant", "content": answer}, *told], self._tools)

    def _encode_after(self, sampled: Sequence[int], after: str) -> list[int] | None:
        """Encode what the template writes after an answer, without the end token that the model has sampled.

        Return None if the template ends the answer with another special token.
        """
        ids, pieces = self._dialogue.pieces.encode(after), self._dialogue.pieces
        if len(pieces.without_end(sampled)) == len(sampled):
            return ids
        at = next((at for at, token in enumerate(ids) if token in pieces.ends), len(ids))
        if at == len(ids) or self._dialogue.decode(ids[:at]).strip():  # the template ends answers with text
            return ids
        return ids[at + 1 :] if ids[at] == sampled[-1] else None


class WrittenText:
    """The prompt of a text completion: token ids, or a text in which names of control tokens are parsed."""

    def __init__(self, dialogue: Dialogue, given: str | Sequence[int]) -> None:
        self._pieces = dialogue.pieces
        if isinstance(given, str):
            self.prompt = encode_prompts(dialogue.tokenizer, replace(dialogue.style, template="plain"), [given])[0]
        else:
            self.prompt = self._pieces.checked(given)
        self.context_ids = self.prompt
        self.num_first, self.starts_anew = len(self.prompt), True

    def go_on(self, sampled: Sequence[int], given: str | Sequence[int]) -> None:
        """Append the sampled ids of an answer, and then the text or ids that follow it in the agent's prompt."""
        ids = self._pieces.encode(given) if isinstance(given, str) else self._pieces.checked(given)
        has_end = isinstance(given, str) and sampled[-1] in self._pieces.ends
        self.starts_anew = has_end and ids[:1] != sampled[-1:]  # the agent's text has no end token here
        if self.starts_anew:
            sampled = sampled[:-1]
        elif has_end:
            ids = ids[1:]
        self.prompt = [*self.prompt, *sampled, *ids]
        self.context_ids = self.prompt if self.starts_anew else ids


class Pieces:
    """Encodes text that continues other text, so that no message writes a control token.

    Control tokens are the special tokens, and added tokens that occur in the chat template's source. `hide` replaces
    their names by marks before a template sees a message. `encode` turns the names behind marks into ordinary tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._joined: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._joined is None:
            raise ConfigError(
                f"An environment needs a tokenizer that has a tokenizer.json, not a {type(tokenizer).__name__}. Make "
                f"one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
        # Random, so that messages cannot contain it. Letters and digits survive normalizers and `tojson` unchanged.
        self.nonce = f"z{secrets.token_hex(8)}z"
        self.end = f"{self.nonce}a"
        self._mark = re.compile(rf"{self.nonce}(\d+)z")
        self._joined.no_truncation()
        self._joined.no_padding()
        spec = json.loads(self._joined.to_str())
        # Some tokenizers have runs of spaces, or HTML tags, as added tokens: these control nothing.
        control = [
            token
            for token in spec["added_tokens"]
            if token["special"] or (token["content"].strip() and token["content"] in template)
        ]
        self._names = {token["id"]: token["content"] for token in control}
        self._numbers = {token["content"]: token["id"] for token in control}
        self._strip = {side: {token["id"] for token in control if token[side]} for side in ("lstrip", "rstrip")}
        special = [token["content"] for token in control if token["special"]]
        self.ends = {*(self._numbers[name] for name in special), tokenizer.eos_token_id}
        """The tokens that end an answer: the end token, and all special tokens."""
        self._control, self._special = re.compile(_any_of(self._numbers)), re.compile(_any_of(special))
        if '"prepend_scheme": "first"' in (steps := json.dumps(spec["pre_tokenizer"])):
            spec["pre_tokenizer"] = json.loads(steps.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"'))
            self._joined = type(self._joined).from_str(json.dumps(spec))
        renamed = _renamed(spec, {name: f"{self.nonce}{number}z" for name, number in self._numbers.items()})
        self._plain = type(self._joined).from_str(json.dumps(renamed))

    def hide(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages with marks instead of control tokens' names. Raises ValueError for a lone surrogate."""
        return [self.hide_in(each, self._special if each["role"] == "assistant" else None) for each in messages]

    def hide_in(self, value: Any, names: re.Pattern[str] | None = None) -> Any:
        """Return a text, or all texts of a mapping or a list, with marks for `names`. Default: all names."""
        if isinstance(value, Mapping):
            return {self.hide_in(key, names): self.hide_in(part, names) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide_in(part, names) for part in value]
        if not isinstance(value, str):
            return value
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ChatTemplateError(f"a message holds half of a character: {error}") from error
        return (names or self._control).sub(lambda name: f"{self.nonce}{self._numbers[name[0]]}z", value)

    def hide_written(self, text: str, sampled: Sequence[int]) -> str:
        """Return the model's text, with marks for spelled-out special tokens that the model did not sample."""
        spelled = [self._numbers[name] for name in self._special.findall(text)]
        as_sampled = spelled == [token for token in sampled if token in self.ends]
        return text if as_sampled else self.hide_in(text, self._special)

    def without_end(self, sampled: Sequence[int]) -> list[int]:
        return [*(sampled[:-1] if sampled and sampled[-1] in self.ends else sampled)]

    def checked(self, token_ids: Sequence[int]) -> list[int]:
        """Return token ids. Raises ValueError for a number that is not a token."""
        size = self._joined.get_vocab_size()
        if wrong := [token for token in token_ids if not 0 <= token < size]:
            raise ValueError(f"token id {wrong[0]} is outside the tokenizer's vocabulary of {size}")
        return list(token_ids)

    def encode(self, text: str) -> list[int]:
        found = self._joined.encode(text, add_special_tokens=False)
        if self.nonce not in text:
            return list(found.ids)
        ids: list[int] = []
        span: list[int] = []
        start = 0
        for token, (left, right) in [*zip(found.ids, found.offsets, strict=True), (None, (len(text), 0))]:
            if token is not None and token not in self._names:
                span.append(token)
                continue
            if self.nonce in (between := text[start:left]):
                # Some control tokens include white space beside them, which their offsets omit.
                between = between.lstrip() if ids and ids[-1] in self._strip["rstrip"] else between
                between = between.rstrip() if token in self._strip["lstrip"] else between
                span = self._plain.encode(self._mark.sub(lambda mark: self._names[int(mark[1])], between)).ids
            ids += span if token is None else [*span, token]
            span, start = [], right
        return ids


def _renamed(spec: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's JSON with renamed tokens. The new tokenizer reads the old names as ordinary text."""
    model = dict(spec["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): number for name, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]]
    return {**spec, "model": model, "added_tokens": added, "post_processor": None}


def _any_of(names: Iterable[str]) -> str:
    """Return a pattern of names without backtracking: some tokenizers have a thousand names."""
    found = []
    for _, group in groupby(sorted(names), key=lambda name: name[0]):
        alike = list(group)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(alike[0], alike[-1], strict=False))
        start = "".join(letter for letter, _ in pairs)
        rest = [name[len(start) :] for name in alike if name != start]
        more = f"(?:{_any_of(rest)})" + ("?" if start in alike else "") if rest else ""
        found.append(re.escape(start) + more)
    return "|".join(found) or "(?!)"
