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


def test_a_column_of_bytes_is_named_with_its_row_and_what_to_do(encoder: Encoder) -> None:
    items = [{"question": "1?", "answer": "1", "image": picture} for picture in (None, {"bytes": b"\x89PNG"})]
    with pytest.raises(ConfigError) as raised:
        encoder.encode(items, first=40)
    assert str(raised.value) == (
        "Item 41 of d.jsonl: column 'image': a value is raw bytes (an image, a sound?). Columns must hold what JSON "
        "has: text, numbers, lists and mappings. Remove the column from the data, or make it text (bytes: base64)."
    )
