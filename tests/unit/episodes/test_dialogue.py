"""Token ids of conversations, with the chat templates of real models (those that the package trl carries)."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hpc_grpo.data.templates import PromptStyle, PromptTemplate, prompt_style, render_chat
from hpc_grpo.episodes import dialogue as module
from hpc_grpo.episodes.dialogue import Conversation, Dialogue
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
WITHOUT_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
CHAT: dict[str, Any] = {
    "template": "chat",
    "prompt_format": "{prompt}",
    "system_prompt": None,
    "chat_template": None,
    "template_args": {},
}
ENDS = {
    "chatml": "<|im_end|>",
    "mistral": "</s>",
    "deepseekv3": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "gemma3": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "lfm2": "<|im_end|>",
    "llama3_2": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>",
}
NAMES = re.compile(r"<[|｜][^<>\s{}'\"]{1,40}[|｜]>|\[/?[A-Z]{3,20}\]|</?(?:s|think|tool_\w+|\w+_of_turn)>")  # noqa: RUF001
TOOL = {"type": "function", "function": {"name": "calc", "description": "Add.", "parameters": {"type": "object"}}}


@cache
def template_of(name: str) -> str:
    if name in ("chatml", "mistral"):
        return CHATML if name == "chatml" else MISTRAL
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl, which has the templates of real models, is not installed")
    return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def tokenizer_of(template: str, end: str, family: str = "bytes") -> Any:
    """Train a small tokenizer, and add the tokens that the template names; `<think>` and such are not special."""
    core = Tokenizer(models.BPE(byte_fallback=family == "sentencepiece"))
    byte_tokens = [f"<0x{number:02X}>" for number in range(256)]
    if family == "sentencepiece":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence(strip)
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=byte_tokens, show_progress=False)
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder, core.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([Path(__file__).read_text()], trainer)
    if family == "sentencepiece":  # its bytes are pieces of the model, as in Llama's
        spec = core.to_str()
        core = Tokenizer.from_str(
            re.sub(r'"added_tokens":\[.*?\],"normalizer"', '"added_tokens":[],"normalizer"', spec)
        )
    names = sorted({*NAMES.findall(template), end, "<bos>"})
    for name in names:
        special = "think" not in name and "tool" not in name
        core.add_tokens([AddedToken(name, special=special, normalized=False, rstrip=family == "phi")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


def made(name: str, family: str = "bytes", **style: Any) -> tuple[Any, PromptStyle, Dialogue]:
    template = template_of(name)
    chosen = PromptStyle(**{**CHAT, **style})
    tokenizer = tokenizer_of(template, ENDS[name], family)
    return tokenizer, chosen, Dialogue(tokenizer, chosen)


def user(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Context(NamedTuple):
    """What a conversation adds to the model's input before its next turn."""

    token_ids: list[int]
    starts_anew: bool


def context_of(conversation: Conversation) -> Context:
    return Context(conversation.context_ids, conversation.starts_anew)


def go_on(conversation: Conversation, sampled: Sequence[int], messages: Sequence[Any]) -> Context:
    conversation.go_on(sampled, messages)
    return context_of(conversation)


@dataclass
class Played:
    """An episode as it is recorded: turns of a context, what was sampled, and the prompt that the model had."""

    turns: list[tuple[Context, list[int], list[int]]] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[list[int], list[bool]]]:
        """Yield token ids and loss mask of each sequence that is trained on."""
        ids: list[int] = []
        mask: list[bool] = []
        for context, sampled, _ in self.turns:
            if context.starts_anew and ids:
                yield ids, mask
                ids, mask = [], []
            ids = [*ids, *context.token_ids, *sampled]
            mask = [*mask, *[False] * len(context.token_ids), *[True] * len(sampled)]
        yield ids, mask


def check_sampled(played: Played, rows: Sequence[tuple[list[int], list[bool]]]) -> None:
    """Each token stands where it was sampled: behind the prompt that the model had, and nothing else is trained."""
    trained = [token for ids, mask in rows for token, is_on in zip(ids, mask, strict=True) if is_on]
    assert trained == [token for _, sampled, _ in played.turns for token in sampled]
    before: list[int] = []
    for context, sampled, prompt in played.turns:
        before = [*([] if context.starts_anew else before), *context.token_ids]
        assert before == prompt
        before = [*before, *sampled]
    assert played.turns[0][0].starts_anew


class Told:
    """What the template says of messages, rendered with letters in place of the names of control tokens."""

    def __init__(self, tokenizer: Any, style: PromptStyle) -> None:
        self.tokenizer, self.style = tokenizer, style
        self.added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self.letters = {name: f"qq{number}qq" for name, number in self.added.items()}

    def lettered(self, messages: Sequence[Any], roles: Sequence[str] = ("user", "tool", "system")) -> list[Any]:
        return [
            m if m["role"] not in roles else {**m, "content": self._swap(m["content"], self.letters)} for m in messages
        ]

    def _swap(self, text: str, names: dict[str, str]) -> str:
        return re.sub("|".join(map(re.escape, sorted(names, key=len, reverse=True))), lambda m: names[m[0]], text)

    def check(self, ids: Sequence[int], text: str, before: int | None = None) -> None:
        """The ids decode to the text, and hold the control tokens that the template wrote, in its order."""
        wrote = [self.added[name] for name in re.findall("|".join(map(re.escape, self.added)), text)]
        found = [token for token in ids if token in self.added.values()]
        if before is not None and wrote[:1] == [before]:
            wrote, text = wrote[1:], text.lstrip()[len(self.tokenizer.convert_ids_to_tokens(before)) :]
        assert found == wrote
        if any(token.rstrip for token in self.tokenizer.added_tokens_decoder.values()):
            text = re.sub(f"({'|'.join(map(re.escape, self.added))})\\s+", r"\1", text)
        back = {letters: name for name, letters in self.letters.items()}
        assert text_of(self.tokenizer, ids).strip() == self._swap(text, back).strip()


SNIPPETS = (
    "Guess",
    "  ",
    "\n\n",
    "\n",
    " ",
    "",
    "5",
    "é☃",
    "😀",
    "<|im_",
    "end|>",
    "<|",
    "{{ x }}",
    "ab cd",
    "\t",
    "No.",
)


def play(rng: random.Random, tokenizer: Any, style: PromptStyle, dialogue: Dialogue, check: bool = True) -> Played:
    told, names = Told(tokenizer, style), sorted(set(tokenizer.get_added_vocab()) - {"<bos>"})
    ends = sorted(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)

    def text() -> str:
        return "".join(rng.choice((*SNIPPETS, rng.choice(names))) for _ in range(rng.randrange(6)))

    def answer() -> list[int]:
        ids = [rng.randrange(260 if len(tokenizer) > 700 else 0, 600) for _ in range(rng.randrange(1, 9))]
        if rng.random() < 0.1:
            ids.insert(rng.randrange(len(ids)), tokenizer.convert_tokens_to_ids(rng.choice(names)))
        if "<think>" in names and rng.random() < 0.4:
            ids = [*ids_of(tokenizer, "<think>\nhm"), *ids_of(tokenizer, "\n</think>\n\n"), *ids]
        end = tokenizer.convert_tokens_to_ids(rng.choice(ends)) if rng.random() < 0.1 else tokenizer.eos_token_id
        return [*ids, end] if rng.random() < 0.75 else ids

    messages: list[Any] = [user(text())]
    conversation = dialogue.begin(messages)
    if check:
        told.check(conversation.prompt, render_chat(tokenizer, style, told.lettered(messages)))
    played = Played()
    for turns_left in reversed(range(rng.randrange(1, 4))):
        sampled = answer()
        played.turns.append((context_of(conversation), sampled, list(conversation.prompt)))
        if not turns_left:
            break
        new = [user(text())]
        messages += [user(dialogue.text_of(sampled), "assistant"), *new]
        context = go_on(conversation, sampled, new)
        if not check:
            continue
        if context.starts_anew:
            told.check(context.token_ids, render_chat(tokenizer, style, told.lettered(messages)))
        else:
            asked = [user("u"), user("AqqAqq", "assistant"), *told.lettered(new)]
            after = render_chat(tokenizer, style, asked).rpartition("AqqAqq")[2]
            told.check(context.token_ids, after, before=sampled[-1])
    return played


FAMILIES = [
    *((name, "bytes") for name in ENDS),
    ("mistral", "sentencepiece"),
    ("gemma3", "sentencepiece"),
    ("phi3", "phi"),
]


@pytest.mark.parametrize(("name", "family"), FAMILIES)
def test_sampled_ids_stand_where_they_were_sampled_in_10_000_episodes(
    name: str, family: str, show: Callable[[str], None]
) -> None:
    tokenizer, style, dialogue = made(name, family)
    rng, episodes = random.Random(name), 10_000 // len(FAMILIES) + 1
    differs = anew = 0
    for _ in range(episodes):
        played = play(rng, tokenizer, style, dialogue)
        rows = list(played.rows())
        check_sampled(played, rows)
        differs += any(ids_of(tokenizer, text_of(tokenizer, ids)) != ids for ids, _ in rows)
        anew += len(rows) > 1
    show(f"{name}, {family}: decode and encode change {differs} of {episodes} episodes; {anew} start anew")
    assert differs > episodes // 3


class Retokenizes(Conversation):
    def go_on(self, sampled: Sequence[int], messages: Sequence[Any]) -> None:
        super().go_on(sampled, messages)
        tokenizer = self._dialogue.tokenizer
        self.prompt = ids_of(tokenizer, text_of(tokenizer, self.prompt))


def test_the_check_finds_a_conversation_that_tokenizes_history_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Conversation", Retokenizes)
    tokenizer, style, dialogue = made("chatml")
    rng = random.Random(0)
    with pytest.raises(AssertionError):
        for _ in range(20):
            played = play(rng, tokenizer, style, dialogue)
            check_sampled(played, list(played.rows()))


@pytest.mark.parametrize("by", [1, -1])
def test_the_check_finds_a_mask_shifted_by_one(by: int) -> None:
    played = play(random.Random(1), *made("chatml"))
    shifted = [(ids, mask[by:] + mask[:by]) for ids, mask in played.rows()]
    with pytest.raises(AssertionError):
        check_sampled(played, shifted)


def test_the_check_finds_control_text_that_becomes_control_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Pieces, "hide", lambda _self, messages: list(messages))
    with pytest.raises(AssertionError):
        for seed in range(20):
            play(random.Random(seed), *made("chatml"))


def test_an_end_token_that_was_sampled_is_not_doubled_and_a_cut_answer_is_closed() -> None:
    tokenizer, _, dialogue = made("chatml")
    after = ids_of(tokenizer, "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n")
    conversation = dialogue.begin([user("Guess.")])
    assert go_on(conversation, [65, tokenizer.eos_token_id], [user("No.")]) == Context(after[1:], starts_anew=False)
    assert go_on(conversation, [66], [user("No.")]) == Context(after, starts_anew=False)
    # The template ends answers with another special token than the one that was sampled.
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert dialogue.text_of([65, 66, other]) == text_of(tokenizer, [65, 66])
    assert go_on(conversation, [66, other], [user("No.")]).starts_anew


def test_an_end_token_stays_where_the_template_ends_answers_with_text() -> None:
    tokenizer = tokenizer_of(WITHOUT_END, "</s>")
    conversation = Dialogue(tokenizer, PromptStyle(**CHAT)).begin([user("Guess.")])
    context = go_on(conversation, [65, tokenizer.eos_token_id], [user("No.")])
    assert context == Context(ids_of(tokenizer, "\nuser: No.\nassistant: "), starts_anew=False)
    assert tokenizer.eos_token_id in conversation.prompt


def test_an_end_token_behind_white_space_of_the_template_is_not_doubled() -> None:
    tokenizer, _, dialogue = made("mistral", "sentencepiece")
    conversation = dialogue.begin([user("Guess.")])
    sampled = [*ids_of(tokenizer, "<bos> It is 5")[1:], tokenizer.eos_token_id]
    context = go_on(conversation, sampled, [user("No.")])
    assert text_of(tokenizer, context.token_ids) == "[INST] No. [/INST]"
    assert conversation.prompt == ids_of(tokenizer, "<bos>[INST] Guess. [/INST] It is 5</s>[INST] No. [/INST]")


@pytest.mark.parametrize(
    ("name", "answer", "role", "starts_anew"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\n5", "user", True),
        ("qwen3", "<think>\nhm\n</think>\n\n5", "tool", False),
        ("qwen3", "<think>hm</think>5", "tool", False),  # the template writes line ends around the reasoning
        ("qwen3", "<think>\nhm", "tool", False),
        ("qwen3", "5", "user", False),
        ("qwen3_5_think", "hm\n</think>\n\n5", "user", True),
        ("qwen3_5_think", "hm\n</think>\n\n5", "tool", False),
        ("deepseekv3", "hm</think>5", "user", True),
        ("nemotron_3_nano", "hm</think>5", "user", True),
        ("glm4moe", "<think>hm</think>5", "user", True),
        ("llama3_2", "\n 5 ", "user", False),
        ("gemma3", "  5\n", "user", False),
    ],
)
def test_a_conversation_starts_anew_where_the_template_rewrites_what_was_said(
    name: str, answer: str, role: str, starts_anew: bool
) -> None:
    tokenizer, style, dialogue = made(name)
    conversation = dialogue.begin([user("Guess.")], [TOOL] if role == "tool" else [])
    before, sampled = list(conversation.prompt), [*ids_of(tokenizer, answer), tokenizer.eos_token_id]
    context = go_on(conversation, sampled, [user("No.", role)])
    assert context.starts_anew == starts_anew
    if starts_anew:
        said = [user("Guess."), user(answer, "assistant"), user("No.", role)]
        assert text_of(tokenizer, context.token_ids) == render_chat(tokenizer, style, said)
        assert conversation.prompt == context.token_ids
    else:
        assert conversation.prompt == [*before, *sampled, *context.token_ids]


TEXTS = ("Guess.", " é☃😀\n\n", "", "   ", "a\r\n\tb" * 300)


@pytest.mark.parametrize("family", ["bytes", "sentencepiece"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"system_prompt": "Be <|im_end|> brief."},
        {"prompt_format": "Q: {prompt} {x}\nA:"},
        {"template": "plain", "prompt_format": "<|im_start|>{prompt}\nA:"},
    ],
)
def test_a_first_prompt_has_the_ids_of_a_prompt_of_the_data_set(keys: dict[str, Any], family: str) -> None:
    template = template_of("chatml")
    tokenizer = tokenizer_of(template, "<|im_end|>", family)
    config = minimal_config(data={"train": {"path": "x.jsonl", "prompt_field": "q"}, **keys}).data
    (_, source), *_ = config.sources(for_eval=False)
    prompts, dialogue = PromptTemplate(config, source, tokenizer), Dialogue(tokenizer, prompt_style(config, source))
    for text in TEXTS[:2] + TEXTS[4:]:
        wanted = prompts.encode([prompts.render({"q": text}, 0)])[0]
        for messages in ([user(text)], prompts.messages({"q": text}, 0)):
            conversation = dialogue.begin(messages)
            assert conversation.prompt == wanted
            assert context_of(conversation) == Context(wanted, starts_anew=True)


def test_contexts_of_base_models_are_the_text_of_messages_without_control_tokens() -> None:
    tokenizer, _, dialogue = made("chatml", template="plain", prompt_format="Q: {prompt}\nA:")
    conversation = dialogue.begin([user("Guess </s> <|im_end|>.")])
    assert text_of(tokenizer, conversation.prompt) == "Q: Guess </s> <|im_end|>.\nA:"
    two = dialogue.begin([user("Guess"), user(" it.")])
    assert text_of(tokenizer, two.prompt) == "Q: Guess it.\nA:"
    context = go_on(conversation, [65, 66, tokenizer.eos_token_id], [user(" No<|im_end|>."), user("\nA:")])
    assert text_of(tokenizer, context.token_ids) == " No<|im_end|>.\nA:"
    assert not {*tokenizer.added_tokens_decoder} & {*context.token_ids, *conversation.prompt[:-20]}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("name", "family"), [("chatml", "bytes"), ("gemma3", "sentencepiece")])
def test_awkward_observations_stand_in_the_context_as_they_are(name: str, family: str, text: str) -> None:
    tokenizer, style, dialogue = made(name, family)
    conversation = dialogue.begin([user(text)])
    for _ in range(3):
        context = go_on(conversation, [65, 66], [user(text)])
        after = render_chat(tokenizer, style, [user("u"), user("@", "assistant"), user(text)]).rpartition("@")[2]
        assert context.token_ids == ids_of(tokenizer, after)


def test_several_messages_of_an_observation_follow_each_other() -> None:
    tokenizer, _, dialogue = made("chatml")
    conversation = dialogue.begin([user("Guess.")])
    told = [user("policy", "system"), user("No.", "tool"), user("<|im_start|>", "assistant"), user("Again.")]
    names = ("policy", "No.", "<|im_start|>", "Again.")
    context = go_on(conversation, [65], told)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in told)
    assert text_of(tokenizer, context.token_ids) == f"<|im_end|>\n{text}<|im_start|>assistant\n"
    assert context.token_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == len(names) + 1
    assert go_on(conversation, [65], []).token_ids == ids_of(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")


def test_examples_of_the_assistant_hold_the_tokens_of_calls_and_no_special_ones() -> None:
    tokenizer, _, dialogue = made("qwen3")
    call, start = tokenizer.convert_tokens_to_ids("<tool_call>"), tokenizer.convert_tokens_to_ids("<|im_start|>")
    text = "<tool_call><|im_start|>"
    prompt = list(dialogue.begin([user(text), user(text, "assistant"), user(text)]).prompt)
    assert (prompt.count(call), prompt.count(start)) == (1, 4)


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3"])
def test_a_call_beside_an_empty_content_is_shown(name: str) -> None:
    tokenizer, _, dialogue = made(name)
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    prompt = dialogue.begin([user("1+1?"), called, user("Go on.")]).prompt
    assert '"name": "add"' in text_of(tokenizer, prompt)


@pytest.mark.parametrize("half", ["\ud83d", "x\udc00y"])
def test_half_of_a_character_is_an_error_and_changes_nothing(half: str) -> None:
    _, _, dialogue = made("chatml")
    with pytest.raises(ValueError, match="half of a character"):
        dialogue.begin([user(half)])
    with pytest.raises(ValueError, match="half of a character"):
        dialogue.begin([user("Guess.")], [{"type": "function", "function": {"name": half}}])
    conversation = dialogue.begin([user("Guess.")])
    before = conversation.prompt, context_of(conversation)
    with pytest.raises(ValueError, match="half of a character"):
        go_on(conversation, [65], [user(half)])
    assert (conversation.prompt, context_of(conversation)) == before
    with pytest.raises(ValueError, match="gave none"):
        dialogue.begin([])


def test_an_answer_cut_in_a_character_stays_as_it_was_sampled() -> None:
    tokenizer, _, dialogue = made("chatml")
    conversation = dialogue.begin([user("Guess.")])
    before, cut = list(conversation.prompt), ids_of(tokenizer, "😀")[:2]
    context = go_on(conversation, cut, [user("No.")])
    assert dialogue.text_of(cut).endswith("\ufffd")
    assert not context.starts_anew
    assert conversation.prompt == [*before, *cut, *context.token_ids]


def test_control_tokens_in_an_answer_stay_tokens_and_their_names_stay_text_when_history_is_rewritten() -> None:
    tokenizer, _, dialogue = made("qwen3")
    end, start = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    think = ids_of(tokenizer, "<think>\nhm\n</think>\n\n")
    for inner, number in (([start], 5), ([token for c in "<|im_start|>" for token in ids_of(tokenizer, c)], 4)):
        conversation = dialogue.begin([user("Guess.")])
        context = go_on(conversation, [*think, *inner, 65, end], [user("No.")])
        assert dialogue.text_of([*inner, 65, end]) == f"<|im_start|>{text_of(tokenizer, [65])}"
        assert context.starts_anew
        assert list(context.token_ids).count(start) == number


@pytest.mark.parametrize(("name", "is_block"), [("chatml", True), ("llama3_2", False), ("qwen2_5", False)])
def test_tools_go_through_the_template_or_into_the_system_message(name: str, is_block: bool) -> None:
    tokenizer, style, dialogue = made(name, system_prompt="Be brief.")
    conversation = dialogue.begin([user("1+1?")], [TOOL])
    text = text_of(tokenizer, conversation.prompt)
    if is_block:
        assert "<|im_start|>system\nBe brief.\n\nYou can call functions." in text
        assert '<tools>\n{"type": "function", "function": {"name": "calc"' in text
    else:
        said = [user("Be brief.", "system"), user("1+1?")]
        assert text == render_chat(tokenizer, style, said, tools=[TOOL])
    context = go_on(conversation, [65, tokenizer.eos_token_id], [user("2<|im_end|>", "tool")])
    assert not context.starts_anew


REFUSALS = [
    (None, {}, "no chat template"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {}, "leaves out the model's answers"),
    (
        "{{ messages[0].content }}{{ messages[1].content if messages[1] }}",
        {},
        "leaves out an environment's messages of the role user",
    ),
    ("{{ raise_exception('no') if messages[1] }}{{ messages[0].content }}", {}, "role user, and .* refuses it: no"),
    (MISTRAL, {"system_prompt": "Be brief."}, "role system, .* Unset data.system_prompt"),
]


@pytest.mark.parametrize(("template", "keys", "message"), REFUSALS)
def test_a_template_that_cannot_be_played_with_is_refused_at_the_start(
    template: str | None, keys: dict[str, Any], message: str
) -> None:
    tokenizer = tokenizer_of(template or "", "</s>")
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        Dialogue(tokenizer, PromptStyle(**{**CHAT, **keys}))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "phi3"])
def test_where_a_template_has_no_role_tool_the_user_tells_what_tools_answer(name: str) -> None:
    tokenizer, _, dialogue = made(name)
    conversation, other = (dialogue.begin([user("1+1?")], [TOOL]) for _ in range(2))
    begun = text_of(tokenizer, conversation.prompt)
    assert '"name": "calc"' in begun
    assert begun.index("</tool_call>") < begun.index("1+1?")
    context = go_on(conversation, [65], [user("2", "tool"), user("<end_of_turn>", "tool")])
    both = "<tool_response>\n2\n</tool_response>\n<tool_response>\n<end_of_turn>\n</tool_response>"
    assert context == go_on(other, [65], [user(both)])
    assert not context.starts_anew
    with pytest.raises(ValueError, match="role critic"):
        go_on(conversation, [65], [user("2", "critic")])


def test_tools_that_cannot_be_shown_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tools needs data.template = chat"):
        made("chatml", template="plain")[2].begin([user("1+1?")], [TOOL])


def test_two_messages_are_refused_where_the_template_wants_turns() -> None:
    conversation = made("gemma3")[2].begin([user("Guess.")])
    with pytest.raises(ValueError, match="refuses it: Conversation roles must alternate"):
        go_on(conversation, [65], [user("No."), user("Again.")])


def test_a_tokenizer_that_adds_spaces_to_pieces_is_refused() -> None:
    tokenizer = tokenizer_of("{{ 0 }}", "</s>", "sentencepiece")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    with pytest.raises(ConfigError, match="prepend_scheme"):
        Dialogue(tokenizer, PromptStyle(**{**CHAT, "template": "plain"}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Dialogue(SlowTokenizer(), PromptStyle(**CHAT))


class SlowTokenizer:
    chat_template, eos_token_id = CHATML, 0
