from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import minimal_config
from tests.support.streams import loaded

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "data_source.py"


def test_the_example_of_a_data_source_trains_and_has_fewer_than_thirty_lines(
    make_tokenizer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = {"path": f"{EXAMPLE}:products", "args": {"num_items": 20, "largest": 5}}
    streams = loaded(minimal_config(data={"train": train, "template": "plain"}), make_tokenizer())
    prompts = [streams.train.prompt(ordinal) for ordinal in range(20)]
    for prompt in prompts:
        left, right = prompt.text.removeprefix("What is ").removesuffix("?").split(" * ")
        assert prompt.fields["answer"] == str(int(left) * int(right))
    again = loaded(minimal_config(data={"train": train, "template": "plain"}), make_tokenizer())
    assert [again.train.prompt(ordinal) for ordinal in range(20)] == prompts
    assert len(EXAMPLE.read_text().splitlines()) < 30
