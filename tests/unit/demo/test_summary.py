from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from hpc_grpo.demo.run import gains, largest_mismatch, next_commands, phases
from tests.support.command import command_of

METRICS = {
    0: {"eval/pass@1": 0.25, "eval/pass@1/gcd": 0.5, "eval/pass@1_low": 0.1, "time/start_s": 4.0, "time/eval_s": 2.0},
    1: {"mismatch/kl": 3e-9, "mismatch/logprob_abs_diff_max": 2e-5, "time/train_s": 10.0, "time/step_s": 11.0},
    2: {"mismatch/kl": 1e-9, "mismatch/logprob_abs_diff_max": 4e-5, "time/train_s": 5.0, "time/eval_s": 1.0}
    | {"eval/pass@1": 0.75, "eval/pass@1/gcd": math.nan},
}


def test_gains_compare_the_first_eval_with_the_last_that_has_a_value() -> None:
    assert gains(METRICS) == [
        "pass@1 0.250 before, 0.750 after (+50.0 points)",
        "pass@1/gcd 0.500 before, 0.500 after (+0.0 points)",
    ]


def test_gains_of_a_run_without_evals() -> None:
    assert gains({1: {"reward/mean": 1.0}}) == []


def test_largest_mismatch_is_that_of_the_worst_step_of_each() -> None:
    assert largest_mismatch(METRICS).endswith("4.0e-05 nats a token, KL 3.0e-09")


def test_phases_add_up_to_the_wall_time() -> None:
    found = phases(METRICS, wall_s=30.0)
    assert found["train"] == 15.0
    assert found["eval"] == 3.0
    assert found["loading the model"] == 4.0
    assert found["Ray, and the end"] == pytest.approx(8.0)
    assert sum(found.values()) == pytest.approx(30.0)


def test_what_to_type_next_are_commands_that_parse(tmp_path: Path) -> None:
    for text, what in next_commands(tmp_path, last_step=12):
        program, name, *arguments = shlex.split(text)
        assert program == "hpc-grpo"
        command_of(name).make_context(name, arguments)
        assert what
