"""What others wrote cannot act on the terminal of whoever looks at a run."""

from __future__ import annotations

import ast
import json
import unicodedata
from pathlib import Path

import pytest

import hpc_grpo.cli
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from tests.support.command import call
from tests.support.run_builder import RunBuilder

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b6n\u202egnp.exe\rCOMPLETE"


@pytest.fixture
def seen(tmp_path: Path) -> RunBuilder:
    """A run whose model, data and reward wrote escape sequences into everything."""
    built = RunBuilder(tmp_path / "runs" / "r")
    record = built.attempt(1, "crash", why=f"RewardError: {HOSTILE}", exit_code=1, lost_nodes={"n2": HOSTILE})
    built.log(record, f"Traceback:\n{HOSTILE}\nValueError: {HOSTILE}\n")
    node = built.folder(record) / "nodes" / "n1"
    node.mkdir(parents=True)
    (node / "agent.log").write_text(HOSTILE)
    built.chain("11", ended=f"gave up: {HOSTILE}")
    sink = JsonlSink(built.run.metrics)
    sink.write(StepRecord(step=1, total_steps=2, metrics={"reward/mean": 0.5, "eval/pass@1": 0.5}))
    sink.close()
    for step in (0, 1):
        line = {"ordinal": 0, "prompt": HOSTILE, "answer": HOSTILE, "completion": HOSTILE, "solved": bool(step)}
        path = built.run.eval_rollouts(step)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(line) + "\n")
    return built


@pytest.mark.parametrize(
    "words",
    [["logs"], ["logs", "-f"], ["logs", "--node", "n1"], ["status", "--why"], ["status"], ["watch"], ["report"]],
    ids=" ".join,
)
def test_a_command_shows_foreign_text_without_obeying_it(seen: RunBuilder, words: list[str]) -> None:
    shown = call(*words, str(seen.run.path))
    assert shown.exit_code == 0, shown.output
    acting = {char for char in shown.output if unicodedata.category(char) in ("Cc", "Cf") and char not in "\n\t"}
    assert acting == set()
    assert words == ["report"] or r"\x1b]52" in shown.output


def test_a_nodes_log_shows_a_bar_and_colours_as_a_file_has_them(seen: RunBuilder) -> None:
    log = next(seen.run.attempts.rglob("agent.log"))
    log.write_text("\x1b[32mLoading\x1b[0m: 10 %\rLoading: 90 %\n")
    assert "\nLoading: 10 %\nLoading: 90 %\n" in call("logs", "--node", "n1", str(seen.run.path)).output


def test_an_error_quotes_what_it_is_about_without_obeying_it() -> None:
    shown = call("status", f"/nowhere/{HOSTILE}")
    assert shown.exit_code != 0
    assert "\x1b" not in shown.output


def test_every_command_prints_through_the_one_that_makes_text_printable() -> None:
    printing = {
        f"{path.stem}: {ast.unparse(node.func)}"
        for path in Path(hpc_grpo.cli.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "click.echo", "click.secho")
    }
    assert printing == {"options: click.echo"}
