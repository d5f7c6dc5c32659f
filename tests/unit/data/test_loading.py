from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.data.encoder import prompt_hash
from hpc_grpo.data.loading import _fitting, _held_out, load_evals, without_duplicates
from hpc_grpo.data.stream import Part, PromptStream
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config
from tests.support.streams import TOKENIZER_ID, loaded, write_items

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=40)
REPEATED = st.lists(st.integers(0, 6), max_size=40)
R1 = "A conversation between User and Assistant."


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any], chat_template: str) -> Any:
    return make_tokenizer(chat_template)


def items(kind: str, count: int) -> list[dict[str, str]]:
    return [{"question": f"{kind} {i}", "answer": str(i)} for i in range(count)]


def config_of(train: dict[str, Any], *, evaluates: bool = False, **data: Any) -> Config:
    return minimal_config(data={"template": "plain", "train": train, **data}, eval={"every": 1 if evaluates else None})


def is_held_out(hashes: Any, fraction: float) -> Any:
    """Tell which rows with these hashes of their prompts are kept for eval."""
    rows: Any = SimpleNamespace(prompt_hashes=np.array(hashes, dtype=np.uint64))
    config = config_of({"path": "d.jsonl"}, held_out=fraction)
    return _held_out(config, Part("d", SourceConfig(path="d.jsonl"), rows, np.arange(len(hashes)), 0))


def texts(stream: PromptStream | Any) -> list[str]:
    return [stream.prompt(ordinal).text for ordinal in range(len(stream))]


def test_a_column_ranks_the_prompts_of_a_curriculum_that_names_it(tokenizer: Any) -> None:
    write_items("a.jsonl", [{**item, "level": 9 - number} for number, item in enumerate(items("a", 4))])
    (part,) = loaded(config_of({"path": "a.jsonl"}, curriculum={"difficulty_field": "level"}), tokenizer).train.parts
    assert part.difficulty is not None
    assert part.difficulty.tolist() == [0.75, 0.5, 0.25, 0.0]
    (part,) = loaded(config_of({"path": "a.jsonl"}, curriculum={}), tokenizer).train.parts
    assert part.difficulty is None
    with pytest.raises(ConfigError, match=r"Item 0 of a\.jsonl .*must be a number, larger for harder prompts"):
        loaded(config_of({"path": "a.jsonl"}, curriculum={"difficulty_field": "question"}), tokenizer)


def test_sources_of_a_mix_have_their_own_share_text_and_rewards(tokenizer: Any) -> None:
    write_items("a.jsonl", items("a", 6))
    write_items("b.jsonl", items("b", 18))
    mix = [
        {"path": "a.jsonl", "weight": 3},
        {"path": "b.jsonl", "weight": 1, "rewards": [{"name": "gsm8k"}], "template": "chat", "name": "bees"},
    ]
    config = config_of({"mix": mix})
    stream = loaded(config, tokenizer).train
    prompts = [stream.prompt(ordinal) for ordinal in range(24)]
    assert Counter(prompt.source for prompt in prompts) == {"a": 18, "bees": 6}
    assert {prompt.text[0] for prompt in prompts if prompt.source == "a"} == {"a"}
    assert {prompt.text[:7] for prompt in prompts if prompt.source == "bees"} == {"<user>b"}
    of_sets = {prompt.source: config.reward_sets[prompt.reward_set][0].name for prompt in prompts}
    assert of_sets == {"a": "correctness", "bees": "gsm8k"}


def test_held_out_prompts_are_evaluated_and_never_trained_on(tokenizer: Any) -> None:
    write_items("d.jsonl", items("q", 300) * 2)
    held = 0.2
    streams = loaded(config_of({"path": "d.jsonl"}, evaluates=True, held_out=held), tokenizer)
    trained, evaluated = texts(streams.train), texts(streams.evals[""])
    assert not set(trained) & set(evaluated)
    assert len(trained) + len(evaluated) == 600
    assert 0.1 < len(evaluated) / 600 < 0.3
    write_items("d.jsonl", items("other", 200) + items("q", 300))
    more = loaded(config_of({"path": "d.jsonl"}, evaluates=True, held_out=held), tokenizer)
    assert set(evaluated) <= set(texts(more.evals[""])), "a row stays on its side when others come"
    assert set(trained) <= set(texts(more.train))


def test_equal_prompts_are_on_one_side_whether_a_column_or_messages_hold_them(tokenizer: Any) -> None:
    texts_of = [f"What is {number} + {number}?" for number in range(300)]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user"}]
    write_items("text.jsonl", [{"question": text, "answer": "1"} for text in texts_of])
    write_items(
        "chat.jsonl",
        [{"messages": [messages[0], {**messages[1], "content": text}], "answer": "1"} for text in texts_of[:150]]
        + [
            {"messages": [{**messages[1], "content": [{"type": "text", "text": text}]}], "answer": "1"}
            for text in texts_of[150:]
        ],
    )
    mix = {"mix": [{"path": "text.jsonl"}, {"path": "chat.jsonl", "messages_field": "messages"}]}
    data = {"template": "chat", "held_out": 0.1}
    streams = loaded(config_of(mix, evaluates=True, **data), tokenizer)
    of_text, of_chat = streams.train.parts
    assert of_text.numbers.tolist() == of_chat.numbers.tolist()
    assert 0 < 300 - len(of_text.numbers) < 100
    with pytest.raises(ConfigError, match=r"Nothing of chat\.jsonl \(chat\) is left"):
        loaded(config_of(mix, deduplicate=True, template="chat"), tokenizer)


def test_conversations_that_differ_in_an_answer_of_the_assistant_are_not_duplicates(tokenizer: Any) -> None:
    turns = [
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        for said in ("Hi", "Good day")
    ]
    write_items("c.jsonl", [{"messages": own, "answer": "1"} for own in turns])
    source = {"path": "c.jsonl", "messages_field": "messages"}
    assert len(loaded(config_of(source, deduplicate=True, template="chat"), tokenizer).train) == 2


def test_messages_may_be_json_text(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Hello"}]
    write_items("c.jsonl", [{"messages": own, "answer": "1"} for own in (turns, json.dumps(turns))])
    config = config_of({"path": "c.jsonl", "messages_field": "messages"}, shuffle=False, template="chat")
    stream = loaded(config, tokenizer).train
    first, second = (stream.prompt(number) for number in range(2))
    assert (first.text, first.token_ids) == (second.text, second.token_ids)
    assert second.fields["messages"] == json.dumps(turns)
    write_items("d.jsonl", [{"messages": "[{", "answer": "1"}])
    with pytest.raises(ConfigError, match=r"Item 0 of d\.jsonl: 'messages' is text, but not a list"):
        loaded(config_of({"path": "d.jsonl", "messages_field": "messages"}, template="chat"), tokenizer)


@pytest.mark.parametrize("content", [None, [], ""])
def test_a_message_that_only_calls_tools_has_a_hash(content: Any) -> None:
    source = SourceConfig(path="c.jsonl", messages_field="m")
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    assert prompt_hash(source, {"m": turns}) == prompt_hash(source, {"m": turns[:1]})


def test_duplicates_and_prompts_of_the_eval_set_are_dropped_and_counted(
    tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    write_items("a.jsonl", [*items("a", 4), {"question": " a  1", "answer": "again"}])
    write_items("b.jsonl", [*items("a", 2), *items("b", 3)])
    write_items("e.jsonl", items("b", 1))
    mix = {"mix": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
    for evaluates in (False, True):  # which a run may change when it is resumed
        config = config_of(mix, evaluates=evaluates, eval={"path": "e.jsonl"}, deduplicate=True, shuffle=False)
        assert texts(loaded(config, tokenizer).train) == ["a 0", "a 1", "a 2", "a 3", "b 1", "b 2"]
    told = capfd.readouterr().err
    assert "a.jsonl: 4 of 5 items are trained on (1 duplicate)." in told
    assert "b.jsonl: 2 of 5 items are trained on (3 duplicate)." in told


@pytest.mark.parametrize("deduplicate", [False, True])
def test_eval_prompts_that_are_trained_on_are_told(
    tokenizer: Any, capfd: pytest.CaptureFixture[str], deduplicate: bool
) -> None:
    write_items("d.jsonl", items("q", 6))
    write_items("e.jsonl", [{"question": "q  1 ", "answer": "1"}, *items("q", 1), *items("h", 2)])
    loaded(config_of({"path": "d.jsonl"}, evaluates=True, eval={"path": "e.jsonl"}, deduplicate=deduplicate), tokenizer)
    told = "warning: e.jsonl: 2 of 4 eval prompts are trained on too. Set data.deduplicate=true"
    assert (told in capfd.readouterr().err) is not deduplicate


def test_named_eval_sets_lie_beside_what_is_held_out_and_keep_their_prompts_from_training(tokenizer: Any) -> None:
    write_items("d.jsonl", items("q", 100))
    write_items("h.jsonl", [*items("q", 1), *items("h", 2)])
    write_items("w.jsonl", items("w", 1))
    sets = {"hard": {"path": "h.jsonl"}, "two": {"mix": [{"path": "h.jsonl"}, {"path": "w.jsonl"}]}}
    data = {"held_out": 0.2, "eval_sets": sets, "deduplicate": True}
    config = config_of({"path": "d.jsonl"}, evaluates=True, **data)
    streams = loaded(config, tokenizer)
    assert list(streams.evals) == ["", "hard", "two"]
    assert texts(streams.evals["hard"]) == ["q 0", "h 0", "h 1"]
    assert [streams.evals["two"].prompt(ordinal).source for ordinal in range(4)] == ["h", "h", "h", "w"]
    assert "q 0" not in texts(streams.train)
    assert streams.digests.keys() == {
        "data.train", "data.eval_sets.hard", "data.eval_sets.two.mix.0", "data.eval_sets.two.mix.1"
    }  # fmt: skip
    alone = load_evals(config, tokenizer, tokenizer_id=TOKENIZER_ID)
    assert {name: texts(stream) for name, stream in alone.items()} == {
        name: texts(stream) for name, stream in streams.evals.items()
    }


def test_a_small_source_of_which_nothing_is_held_out_is_trained_on_alone(tokenizer: Any) -> None:
    write_items("a.jsonl", items("a", 300))
    write_items("b.jsonl", items("b", 1))
    mix = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    streams = loaded(config_of({"mix": mix}, evaluates=True, held_out=0.1), tokenizer)
    assert {streams.evals[""].prompt(ordinal).source for ordinal in range(len(streams.evals[""]))} == {"a"}
    config = config_of({"path": "b.jsonl"}, evaluates=True, held_out=0.1)
    with pytest.raises(ConfigError, match="holds nothing out of data"):
        loaded(config, tokenizer)


def test_a_source_of_which_nothing_is_left_is_named(tokenizer: Any) -> None:
    write_items("a.jsonl", items("a", 2))
    config = config_of({"mix": [{"path": "a.jsonl"}, {"path": "a.jsonl"}]}, deduplicate=True)
    with pytest.raises(ConfigError, match=r"Nothing of a.jsonl \(a#2\) is left.* data.deduplicate=false"):
        loaded(config, tokenizer)


def test_deepseeks_prompt_is_a_base_models_conversation_or_a_system_prompt(tokenizer: Any) -> None:
    write_items("d.jsonl", items("q", 1))
    plain = texts(loaded(config_of({"path": "d.jsonl"}, preprocessing="deepseek"), tokenizer).train)[0]
    assert plain.startswith(R1)
    assert plain.endswith("<answer> answer here </answer>. User: q 0. Assistant:")
    chat = texts(loaded(config_of({"path": "d.jsonl"}, preprocessing="deepseek", template="chat"), tokenizer).train)[0]
    assert chat.startswith(f"<system>{R1}")
    assert chat.endswith("</answer>.\n<user>q 0\n<assistant>")
    with pytest.raises(ConfigError, match="brings its own prompt"):
        loaded(config_of({"path": "d.jsonl", "prompt_format": "Q {prompt}"}, preprocessing="deepseek"), tokenizer)


def test_a_chat_template_of_ones_own_gets_its_arguments(tokenizer: Any) -> None:
    write_items("d.jsonl", items("q", 1))
    Path("t.jinja").write_text("{{ messages[0].content }}{% if think %}<think>{% endif %}")
    own = {"template": "t.jinja", "template_args": {"think": True}}
    assert texts(loaded(config_of({"path": "d.jsonl"}, **own), tokenizer).train) == ["q 0<think>"]
    assert texts(loaded(config_of({"path": "d.jsonl", "template_args": {}}, **own), tokenizer).train) == ["q 0"]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({}, "path must be set, or mix"),
        ({"path": "a", "mix": [{"path": "b"}]}, "path and mix exclude each other"),
        ({"split": "test", "mix": [{"path": "b"}]}, "split belongs to each source of the mix"),
    ],
)
def test_a_data_set_is_one_source_or_a_mix(train: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(train)


@settings(max_examples=60, deadline=None)
@given(HASHES, HASHES, st.floats(0.01, 0.99))
def test_a_row_stays_on_its_side_of_the_split_whatever_other_rows_there_are(
    hashes: list[int], others: list[int], fraction: float
) -> None:
    alone, beside = is_held_out(hashes, fraction), is_held_out([*others, *hashes], fraction)
    assert alone.tolist() == beside[len(others) :].tolist()


def test_the_split_takes_its_fraction() -> None:
    hashes = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, 100_000, dtype=np.uint64)
    assert is_held_out(hashes, 0.05).mean() == pytest.approx(0.05, abs=0.003)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 20))
def test_what_fits_is_kept_in_order_or_the_first_long_one_is_named(lengths: list[int], most: int) -> None:
    rows: Any = SimpleNamespace(num_prompt_tokens=np.array(lengths, dtype=np.int32))
    part = Part("d", SourceConfig(path="d.jsonl"), rows, np.arange(len(lengths), dtype=np.int64), 0)
    dropping, strict = (
        config_of({"path": "d.jsonl"}, max_prompt_tokens=most, drop_long_prompts=drops) for drops in (True, False)
    )
    fits = [number for number, length in enumerate(lengths) if length <= most]
    if fits:
        assert _fitting(dropping, part, part.numbers).tolist() == fits
    else:
        with pytest.raises(ConfigError, match="leaves nothing"):
            _fitting(dropping, part, part.numbers)
    if len(fits) < len(lengths):
        first = next(number for number, length in enumerate(lengths) if length > most)
        with pytest.raises(ConfigError, match=f"Item {first} of d.jsonl"):
            _fitting(strict, part, part.numbers)


def test_a_row_whose_environment_makes_the_prompt_may_be_longer_than_a_prompt(tokenizer: Any) -> None:
    write_items("d.jsonl", [{"id": 1}, {"id": 2, "state": "x " * 40}])
    train = {"path": "d.jsonl", "prompt_field": None, "answer_field": None, "environment": {"name": "e.py:Own"}}
    stream = loaded(config_of(train, max_prompt_tokens=20), tokenizer).train
    assert isinstance(stream, PromptStream)
    assert len(stream) == 2


@settings(max_examples=100, deadline=None)
@given(REPEATED, REPEATED)
def test_of_equal_prompts_the_first_stays_and_none_that_was_seen(hashes: list[int], seen: list[int]) -> None:
    candidates = np.arange(len(hashes), dtype=np.int64)
    kept, now_seen = without_duplicates(
        candidates, np.array(hashes, dtype=np.uint64), np.unique(np.array(seen, dtype=np.uint64))
    )
    expected, known = [], set(seen)
    for number, value in enumerate(hashes):
        if value not in known:
            expected.append(number)
            known.add(value)
    assert kept.tolist() == expected
    assert set(now_seen.tolist()) == known
