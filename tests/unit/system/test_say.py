from __future__ import annotations

import io

from hpc_grpo.system.say import say


def test_what_the_terminal_has_no_characters_for_costs_no_run() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    say("The driver crashed: ValueError: \u7b54", stream)
    stream.seek(0)
    assert stream.read() == "'The driver crashed: ValueError: \\u7b54'\n"
