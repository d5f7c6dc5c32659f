from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from hpc_grpo.data.encoder import Encoder
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config


@pytest.fixture
def encoder(make_tokenizer: Callable[..., Any], chat_template: str) -> Encoder:
    config = minimal_config()
    ((_, source),) = config.data.sources(for_eval=False)
    return Encoder(config, source, make_tokenizer(chat_template))


def test_what_tables_hold_becomes_what_json_has(encoder: Encoder) -> None:
    more = {"on": date(2025, 1, 2), "price": Decimal("1.50"), "grid": np.arange(3)}
    (row,) = encoder.encode([{"question": "1?", "answer": "1", **more}], first=7)
    assert row.fields == '{"question": "1?", "answer": "1", "on": "2025-01-02", "price": "1.50", "grid": [0, 1, 2]}'


@pytest.mark.parametrize("answer", [None, float("nan"), np.float32("nan")])
def test_a_missing_answer_of_any_table_is_refused(encoder: Encoder, answer: Any) -> None:
    with pytest.raises(ConfigError, match=r"'answer' \(answer_field\) is null or NaN"):
        encoder.encode([{"question": "1?", "answer": answer}], first=0)


def test_an_answer_that_is_an_array_is_no_missing_one(encoder: Encoder) -> None:
    (row,) = encoder.encode([{"question": "1?", "answer": np.array([1.0, float("nan")])}], first=0)
    assert row.fields == '{"question": "1?", "answer": [1.0, NaN]}'


_STRING = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"
_ADDED = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
_JSON = _STRING.replace("m['content'] | trim", "m.content if m.content is string else m.content | tojson")
_PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
_BOTH = _PARTS.replace("{% for part", "{% if m.content is string %}{{ m.content }}{% else %}{% for part").replace(
    "endfor %}{% endfor", "endfor %}{% endif %}{% endfor"
)


@pytest.mark.parametrize("template", [_STRING, _ADDED, _JSON, _PARTS, _BOTH])
def test_parts_of_text_are_written_as_text_by_every_template(make_tokenizer: Callable[..., Any], template: str) -> None:
    config = minimal_config(data={"template": "chat", "train": {"path": "d.jsonl", "messages_field": "messages"}})
    ((_, source),) = config.data.sources(for_eval=False)
    parts = [{"type": "text", "text": "1 + 1"}, {"type": "text", "text": " = ?"}]
    (row,) = Encoder(config, source, make_tokenizer(template)).encode(
        [{"messages": [{"role": "user", "content": parts}], "answer": "2"}], first=0
    )
    assert row.text == "<user>1 + 1 = ?"
    assert '[{"type": "text", "text": "1 + 1"}' in row.fields


def test_a_column_of_bytes_is_named_with_its_row_and_what_to_do(encoder: Encoder) -> None:
    items = [{"question": "1?", "answer": "1", "image": picture} for picture in (None, {"bytes": b"\x89PNG"})]
    with pytest.raises(ConfigError) as raised:
        encoder.encode(items, first=40)
    assert str(raised.value) == (
        "Item 41 of d.jsonl: column 'image': a value is raw bytes (an image, a sound?). Columns must hold what JSON "
        "has: text, numbers, lists and mappings. Remove the column from the data, or make it text (bytes: base64)."
    )
