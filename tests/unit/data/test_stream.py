from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.config.run import Every
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config
from tests.support.streams import demonstrations, loaded, prompts, write_items

ITEMS = [{"question": f"{i}+1=", "answer": f"so #### {i + 1}", "level": i} for i in range(10)]
MESSAGES = [{"role": "user", "content": "hi"}]


def make_config(train: dict[str, Any] | None = None, **data: Any) -> Config:
    source = {"path": "d.jsonl", **(train or {})}
    return minimal_config(
        data={"train": source, "template": "plain", **data}, train={"max_tokens_per_microbatch": 1000}
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are written to, and tokenized below, the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


def test_every_epoch_gives_every_item_once_and_in_another_order(tokenizer: Any) -> None:
    stream = prompts(make_config(), ITEMS, tokenizer, seed=1)
    assert len(stream) == 10
    epochs = [[stream.prompt(10 * epoch + place) for place in range(10)] for epoch in range(3)]
    for epoch, asked in enumerate(epochs):
        assert sorted(prompt.text for prompt in asked) == sorted(item["question"] for item in ITEMS)
        assert {prompt.epoch for prompt in asked} == {epoch}
    assert len({tuple(prompt.text for prompt in asked) for asked in epochs}) == 3


def test_the_order_of_one_source_golden(tokenizer: Any) -> None:
    """A change of these values would make every run in flight resume on the wrong prompts."""
    stream = prompts(make_config(), ITEMS, tokenizer, seed=0)
    assert [stream.prompt(ordinal).fields["level"] for ordinal in range(10)] == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    other = prompts(make_config(), ITEMS, tokenizer, seed=42)
    assert [other.prompt(ordinal).fields["level"] for ordinal in range(30, 40)] == [4, 3, 7, 2, 5, 1, 9, 8, 0, 6]


def test_a_prompt_depends_on_nothing_but_seed_and_ordinal(tokenizer: Any) -> None:
    straight = prompts(make_config(), ITEMS, tokenizer, seed=1)
    expected = [straight.prompt(ordinal) for ordinal in range(40)]
    resumed = prompts(make_config(), ITEMS, tokenizer, seed=1)
    assert [resumed.prompt(ordinal) for ordinal in reversed(range(40))] == expected[::-1]
    other = prompts(make_config(), ITEMS, tokenizer, seed=2)
    assert [other.prompt(ordinal).text for ordinal in range(40)] != [prompt.text for prompt in expected]


def test_prompt_holds_tokens_of_its_text_and_all_columns(tokenizer: Any) -> None:
    stream = prompts(make_config(shuffle=False, prompt_format="Q{{}} {prompt}\nA:"), ITEMS, tokenizer, 0)
    prompt = stream.prompt(13)
    assert (prompt.ordinal, prompt.epoch, prompt.text) == (13, 1, "Q{{}} 3+1=\nA:")
    assert tokenizer.decode(list(prompt.token_ids)) == prompt.text
    assert len(prompt.token_ids) == len(prompt.text)
    assert prompt.fields == ITEMS[3]


def test_the_reference_is_given_as_answer_whatever_its_column(tokenizer: Any) -> None:
    items = [{"question": "q", "solution": "7", "answer": "unused"}]
    named = prompts(make_config({"answer_field": "solution"}), items, tokenizer, 0)
    assert named.prompt(0).fields == {"question": "q", "solution": "7", "answer": "7"}
    inside = [{"question": "q", "reward_model": {"ground_truth": "4"}}]
    dotted = prompts(make_config({"answer_field": "reward_model.ground_truth"}), inside, tokenizer, 0)
    assert dotted.prompt(0).fields["answer"] == "4"
    with pytest.raises(ConfigError, match=r"there is no field 'reward_model\.truth'"):
        prompts(make_config({"answer_field": "reward_model.truth"}), inside, tokenizer, 0)
    without = prompts(make_config({"answer_field": None}), [{"question": "q"}], tokenizer, 0)
    assert without.prompt(0).fields == {"question": "q"}


def test_eval_has_its_own_columns_and_no_shuffle(tokenizer: Any) -> None:
    config = make_config(eval={"path": "e.jsonl", "prompt_field": "problem"})
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": Every(steps=1)})})
    write_items("d.jsonl", ITEMS)
    write_items("e.jsonl", [{"problem": str(i), "answer": "1"} for i in range(10)])
    stream = loaded(config, tokenizer).evals[""]
    assert [stream.prompt(i).text for i in range(10)] == [str(i) for i in range(10)]


def test_negative_ordinal_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="count from 0"):
        prompts(make_config(), ITEMS, tokenizer, 0).prompt(-1)


def test_long_prompt_is_an_error_that_names_it(tokenizer: Any) -> None:
    items = [*ITEMS, {"question": "x" * 33, "answer": "1"}]
    with pytest.raises(ConfigError) as caught:
        prompts(make_config(max_prompt_tokens=32), items, tokenizer, 0)
    for words in ("Item 10 ", "33 tokens", "data.max_prompt_tokens = 32", "data.drop_long_prompts"):
        assert words in str(caught.value)


def test_long_prompts_are_dropped_and_counted(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    long = {"question": "x" * 33, "answer": "1"}
    config = make_config(max_prompt_tokens=32, drop_long_prompts=True)
    stream = prompts(config, [long, *ITEMS, long], tokenizer, 0)
    assert len(stream) == 10
    assert {stream.prompt(ordinal).text for ordinal in range(10)} == {item["question"] for item in ITEMS}
    assert "d.jsonl: 10 of 12 items are trained on (2 too long)." in capfd.readouterr().err
    with pytest.raises(ConfigError, match="leaves nothing"):
        prompts(config, [long], tokenizer, 0)


def test_a_tokenizer_that_appends_its_end_token_does_not_end_the_prompt(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    prompt = prompts(make_config(shuffle=False), ITEMS, tokenizer, 0).prompt(0)
    assert tokenizer.eos_token_id not in prompt.token_ids


def test_chat_template_with_system_prompt(make_tokenizer: Callable[..., Any], chat_template: str) -> None:
    config = make_config(template="chat", system_prompt="Be brief.", shuffle=False)
    prompt = prompts(config, ITEMS, make_tokenizer(chat_template), 0).prompt(0)
    assert prompt.text == "<system>Be brief.\n<user>0+1=\n<assistant>"


def test_messages_keep_their_own_system_message(make_tokenizer: Callable[..., Any], chat_template: str) -> None:
    own = [{"role": "system", "content": "Own."}, *MESSAGES]
    items = [{"m": own, "answer": "1"}, {"m": MESSAGES, "answer": "1"}]
    config = make_config({"messages_field": "m"}, template="chat", system_prompt="Ours.", shuffle=False)
    stream = prompts(config, items, make_tokenizer(chat_template), 0)
    assert stream.prompt(0).text == "<system>Own.\n<user>hi\n<assistant>"
    assert stream.prompt(1).text == "<system>Ours.\n<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "but not a list of messages in JSON"),
        ([], "must be a list of messages"),
        ([{"role": "user"}], "must have role and content"),
        ([*MESSAGES, {"role": "assistant", "content": "x"}], "ends with a message of the assistant"),
        ([{"role": "tool", "content": "x"}], "no tools here"),
    ],
)
def test_messages_that_are_no_prompt(
    make_tokenizer: Callable[..., Any], chat_template: str, messages: Any, words: str
) -> None:
    config = make_config({"messages_field": "m"}, template="chat")
    with pytest.raises(ConfigError, match="Item 0") as caught:
        prompts(config, [{"m": messages, "answer": "1"}], make_tokenizer(chat_template), 0)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "train", "words"),
    [
        ({"template": "chat"}, {}, "has no chat template"),
        ({"system_prompt": "x"}, {}, "data.prompt_format"),
        ({"prompt_format": "no place"}, {}, "must contain {prompt}"),
        ({}, {"messages_field": "m"}, "needs data.template = chat"),
    ],
)
def test_config_that_does_not_fit_the_tokenizer(tokenizer: Any, data: Any, train: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prompts(make_config(train, **data), ITEMS, tokenizer, 0)
    assert words in str(caught.value)


def test_prompt_that_is_no_text_is_named(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"Item 1 .* must be text, not NoneType"):
        prompts(make_config(), [ITEMS[0], {"question": None, "answer": "1"}], tokenizer, 0)


@pytest.mark.parametrize("drop", [False, True])
def test_an_empty_prompt_is_an_error_that_names_it(tokenizer: Any, drop: bool) -> None:
    """An engine has nothing to continue; it is no long prompt, so dropping those does not hide it."""
    items = [*ITEMS, {"question": "", "answer": "1"}]
    with pytest.raises(ConfigError, match=r"Item 10 of d.jsonl \(counted from 0\) has an empty prompt"):
        prompts(make_config(drop_long_prompts=drop), items, tokenizer, 0)


def test_an_empty_prompt_of_a_demonstration_is_an_error_too(tokenizer: Any) -> None:
    """The first token of a completion is learned from the token before it."""
    with pytest.raises(ConfigError, match=r"Item 0 of d.jsonl \(counted from 0\) has an empty prompt"):
        demonstrations(make_config(), [{"question": "", "answer": "1"}], tokenizer, 0)


def test_text_that_no_encoding_can_write_is_named(tokenizer: Any) -> None:
    """JSON may hold half a character (\\ud83d), which tokenizers refuse with a TypeError."""
    items = [*ITEMS, {"question": "a\ud83d", "answer": "1"}]
    with pytest.raises(ConfigError, match=r"Item 10 of d.jsonl .* '\\ud83d'"):
        prompts(make_config(), items, tokenizer, 0)


def test_demonstrations_end_with_the_end_token_and_follow_the_same_order(tokenizer: Any) -> None:
    shown = demonstrations(make_config(), ITEMS, tokenizer, seed=5)
    asked = prompts(make_config(), ITEMS, tokenizer, seed=5)
    assert len(shown) == 10
    for ordinal in range(25):
        demonstration, prompt = shown.demonstration(ordinal), asked.prompt(ordinal)
        assert (demonstration.ordinal, demonstration.epoch) == (ordinal, ordinal // 10)
        assert demonstration.prompt_token_ids == prompt.token_ids
        *text, end = demonstration.completion_token_ids
        assert tokenizer.decode(text) == prompt.fields["answer"]
        assert end == tokenizer.eos_token_id


def test_demonstration_that_fits_no_microbatch(tokenizer: Any) -> None:
    items = [*ITEMS, {"question": "q", "answer": "y" * 999}]
    with pytest.raises(ConfigError, match=r"Item 10 .* 1001 tokens.*train.max_tokens_per_microbatch = 1000"):
        demonstrations(make_config(), items, tokenizer, 0)
    kept = demonstrations(make_config(drop_long_prompts=True), items, tokenizer, 0)
    assert len(kept) == 10


@pytest.mark.parametrize(("item", "words"), [({}, "no field 'answer'"), ({"answer": ""}, "empty")])
def test_demonstration_without_completion(tokenizer: Any, item: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)item 0") as caught:
        demonstrations(make_config(), [{"question": "q", **item}], tokenizer, 0)
    assert words in str(caught.value)


def test_completion_that_no_encoding_can_write_is_named(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"Item 0 of d.jsonl .* '\\ud83d'"):
        demonstrations(make_config(), [{"question": "q", "answer": "a\ud83d"}], tokenizer, 0)


def test_demonstrations_need_an_end_token(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="eos_token"):
        demonstrations(make_config(), ITEMS, tokenizer, 0)
