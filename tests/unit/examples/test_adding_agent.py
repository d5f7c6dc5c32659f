from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.types import GroupRequest, SamplingSpec
from tests.unit.engine.test_endpoint import TEMPLATE
from tests.unit.engine.test_episodes import WrittenEngine, make_config, only, play, scene

FILE = Path(__file__).parents[3] / "examples" / "adding_agent.py"


@pytest.mark.parametrize(("second", "told", "reward"), [("2", "<tool>5", 1.0), ('"2"', "<tool>Error: TypeError", 0.0)])
def test_the_model_adds_by_the_tool(make_tokenizer: Callable[..., Any], second: str, told: str, reward: float) -> None:
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": 3, "b": {second}}}}}</tool_call>'
    answers = iter([call, "It is 5." if reward else "?"])
    engine = WrittenEngine(make_tokenizer(TEMPLATE), lambda _: next(answers))
    row = {"messages": [{"role": "user", "content": "3 + 2 = ?"}], "answer": "5"}
    request = GroupRequest(0, (), (7,), SamplingSpec(max_new_tokens=200), scene=scene(**row))
    episode = only(play(make_config("AddingAgent", file=FILE), engine, request))
    assert ([turn.reward for turn in episode.turns], episode.failure) == ([0.0, reward], "")
    assert told in engine.tokenizer.decode(engine.calls[1][0].prompt_token_ids)
