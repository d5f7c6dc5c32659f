from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.driver import inputs
from hpc_grpo.driver.inputs import refuse_shown_files
from hpc_grpo.episodes.workers import Answer
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config
from tests.support.streams import prompts


def test_a_run_or_data_that_programs_in_the_sandbox_would_see_is_refused(tmp_path: Path) -> None:
    shown = Path(sys.base_prefix) / "lib"
    code, own = [{"name": "code"}], [{"name": "own.py:reward"}]
    refuse_shown_files(minimal_config(run={"root": tmp_path}, rewards=code))
    refuse_shown_files(minimal_config(run={"root": shown}, rewards=[{"name": "math"}]))
    for rewards in (code, own):
        with pytest.raises(ConfigError, match="would see"):
            refuse_shown_files(minimal_config(run={"root": shown}, rewards=rewards))
    with pytest.raises(ConfigError, match="would see"):
        refuse_shown_files(minimal_config(run={"root": tmp_path}, rewards=code, data={"train": {"path": str(shown)}}))


def test_an_environment_is_tried_with_the_row_that_training_gives_it(
    make_tokenizer: Callable[..., Any], chat_template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = minimal_config(
        data={"template": "plain", "train": {"path": "d.jsonl", "answer_field": "solution"}},
        environment={"name": "own.py:Own"},
        eval={"every": None},
    )
    tokenizer, tried = make_tokenizer(chat_template), list[Any]()

    def begin(key: str, environment: Any, row: Any, *, is_resume: bool) -> Answer:
        tried.append((row, is_resume))
        return Answer([])

    monkeypatch.setattr(inputs, "first_answer", begin)
    stream = prompts(config, [{"question": "Which?", "solution": "this"}], tokenizer)
    inputs._check_environments(config, tokenizer, [stream], is_resume=True)
    assert tried == [(stream.prompt(0).fields, True)]
