from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from hpc_grpo.episodes.builtin import environment_of

FILE = Path(__file__).parents[3] / "examples" / "lookup_tool.py"


def test_the_example_of_a_tool_answers_the_model_and_says_what_it_does_not_know() -> None:
    environment: Any = environment_of("tools", {}, [f"{FILE}:population"])
    [schema] = environment.tools
    assert schema["function"]["description"] == "Return how many people live in a city."
    assert schema["function"]["parameters"]["properties"]["city"]["description"] == "The name of the city, in English."
    calls = [json.dumps({"name": "population", "arguments": {"city": city}}) for city in ("Oslo", "Rome")]
    turn = asyncio.run(environment.step("".join(f"<tool_call>{call}</tool_call>" for call in calls)))
    oslo, rome = (message["content"] for message in turn.observation)
    assert oslo == "717710"
    assert rome == "Error: no such city; there are Oslo, Quito, Perth"
