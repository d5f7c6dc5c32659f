"""A callback of the user's ends a run, or is turned off; it never loses the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config.train import CallbackConfig
from hpc_grpo.driver.callback import StepCallback
from hpc_grpo.errors import ConfigError

FUNCTIONS = """
import os, sys, time

CALLS = []

def ends(step, metrics, evals, at=3):
    CALLS.append((step, dict(metrics), {number: dict(own) for number, own in evals.items()}))
    metrics.clear(), evals.clear()
    return f"step {at} is\\n  enough" if step >= at else None

def raises(step, metrics, evals):
    CALLS.append(step)
    raise ValueError("no eval/pass@1; key hf_abcdefghijklmnopqrstuvwxyz012345")

def exits(step, metrics, evals):
    CALLS.append(step)
    sys.exit(3)

def hangs(step, metrics, evals):
    CALLS.append(step)
    time.sleep(60)

def says_true(step, metrics, evals):
    CALLS.append(step)
    return True

def takes_two(step, metrics):
    return None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def make(file: Path, name: str, timeout_s: float = 60.0, **settings: Any) -> tuple[StepCallback, list[Any]]:
    callback = StepCallback(CallbackConfig(name=f"{file}:{name}", **settings), timeout_s)
    calls: list[Any] = callback._function.func.__globals__["CALLS"]  # type: ignore[attr-defined]
    return callback, calls


def test_a_callback_sees_every_eval_so_far_and_ends_the_run_with_its_reason(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, calls = make(file, "ends", args={"at": 2})
    callback.note(0, {"eval/pass@1": 0.1, "time/eval_s": 3.0})
    assert callback.ask(1, {"reward/mean": 0.5}) == ""
    assert callback.end_reason == ""
    assert callback.ask(2, {"reward/mean": 0.6, "eval/pass@1": 0.2}) == "step 2 is enough"
    assert callback.end_reason == "step 2 is enough"
    assert calls == [
        (1, {"reward/mean": 0.5}, {0: {"eval/pass@1": 0.1}}),
        (2, {"reward/mean": 0.6, "eval/pass@1": 0.2}, {0: {"eval/pass@1": 0.1}, 2: {"eval/pass@1": 0.2}}),
    ], "each call has its own copies"
    assert capsys.readouterr().out == "Stopping after step 2: step 2 is enough\n"


def test_a_resumed_run_has_the_evals_up_to_its_checkpoint(file: Path) -> None:
    callback, calls = make(file, "ends", args={"at": 9})
    earlier = {0: {"eval/pass@1": 0.1}, 5: {"eval/pass@1": 0.2, "lr": 1.0}, 6: {"lr": 1.0}, 10: {"eval/pass@1": 0.9}}
    callback.resume(earlier, 6)
    callback.ask(7, {})
    assert calls == [(7, {}, {0: {"eval/pass@1": 0.1}, 5: {"eval/pass@1": 0.2}})]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "raised ValueError: no eval/pass@1; key ******** ({file}:13) after step 1, and is off until"),
        ("exits", "raised SystemExit: 3 ({file}:17) after step 1, and is off until the run starts again."),
        ("hangs", "gave no answer for 0.2 s (deadlines.silent_s) after step 1, and is off until"),
        ("says_true", "returned True instead of None, or a text that says why the run is complete, after step 1, and"),
    ],
)
def test_a_callback_that_fails_is_off_and_the_run_goes_on(
    file: Path, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, calls = make(file, name, timeout_s=0.2)
    began = time.monotonic()
    said = callback.ask(1, {})
    assert said.startswith(f"train.on_step.name = {file}:{name} {says.format(file=file)}")
    assert callback.ask(2, {}) == said, "what is wrong stays in the status"
    assert time.monotonic() - began < 10
    assert calls == [1]
    assert callback.end_reason == ""
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("end", {}, "has no 'end'. It has: ends, exits, hangs, raises, says_true, takes_two"),
        ("ends", {"after": 3}, "does not take them|is called with 3 inputs and its args, here: after"),
        ("takes_two", {}, "is called with 3 inputs and its args, here: none"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_training(
    file: Path, name: str, args: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(file, name, args=args)
