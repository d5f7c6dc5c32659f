"""Every command that prints facts has `--json`; the list says which have not, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest

from hpc_grpo.cli import main
from hpc_grpo.cli.options import JSON, echo_json
from tests.support.command import call, command_of
from tests.support.run_builder import RunBuilder

FACTS = {
    "config", "plan", "status", "compare",
    "model eval", "model sample", "model replay", "reward test", "reward score",
    "cluster doctor", "cluster prefetch", "disk du",
    "place fleet jobs", "place fleet job", "place fleet vm list",
}  # fmt: skip
NO_FACTS = {
    "writes a file or folder, whose place it prints": {"init", "fork", "report", "model export"},
    "trains, serves or runs until it ends": {
        "train", "demo", "grpo", "model serve", "reward serve", "cluster shell", "cluster ray", "place pod",
        "place host head", "place host worker", "place fleet up", "place fleet poll", "place fleet dispatch",
        "place fleet requeue", "attempt", "job-setup",
    },
    "acts; --parsable prints a job's id": {
        "submit", "stop", "disk clean", "place host stop", "place fleet init", "place fleet submit",
        "place fleet cancel", "place fleet vm add", "place fleet vm drain", "place fleet vm remove",
    },
    "prints a log as it is": {"logs", "place fleet logs"},
    "is for eyes; status has its facts": {"watch", "dashboard", "place fleet watch"},
}  # fmt: skip
OLD_OPTIONS = {"--output", "--output-file", "--folder", "--dir", "--num-samples", "--lines", "--as-json", "--format"}


def commands(group: click.Group = main, words: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{words}{name} ")
        else:
            yield f"{words}{name}", command


def test_each_command_prints_facts_as_json_or_has_a_reason_why_not() -> None:
    with_json = {name for name, command in commands() if any("--json" in own.opts for own in command.params)}
    reasoned = [name for names in NO_FACTS.values() for name in names]
    assert with_json == FACTS
    assert sorted(reasoned) == sorted({name for name, _ in commands()} - FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_the_option_is_the_same_everywhere(name: str) -> None:
    @JSON
    def shared() -> None: ...

    [expected] = shared.__click_params__  # type: ignore[attr-defined]
    [option] = [own for own in command_of(name).params if "--json" in own.opts]
    assert option.to_info_dict() == expected.to_info_dict()


def test_no_command_has_an_option_of_another_name_for_out_num_root_and_json() -> None:
    found = {name: OLD_OPTIONS & {opt for own in command.params for opt in own.opts} for name, command in commands()}
    assert {name: options for name, options in found.items() if options} == {}


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json({"a": (float("nan"), 1.5), "b": {"c": float("inf")}, 3: "\x1b[2J"})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"a": [None, 1.5], "b": {"c": None}, "3": "\x1b[2J"}
    assert "\x1b" not in printed


def test_why_of_a_run_as_json_has_each_attempt_and_what_to_do(built: RunBuilder) -> None:
    record = built.attempt(1, "crash", exit_code=1)
    built.log(record, "error: CUDA out of memory.\n")
    [run] = json.loads(call("status", "--why", "--json", str(built.run.path)).stdout)
    assert (run["path"], run["state"]) == (str(built.run.path), "failed")
    [attempt] = run["attempts"]
    assert (attempt["attempt"], attempt["ended_as"], attempt["why"]) == (1, "crash", "why 1")
    assert attempt["error"] == "error: CUDA out of memory."
    assert attempt["todo"]


def test_a_reward_test_as_json_has_its_parts() -> None:
    words = ["reward", "test", "correctness", "--prompt", "1+1?", "--answer", "2", "--json"]
    done = call(*words, "--completion", "It is 2.", "--completion", "It is 3.")
    assert json.loads(done.stdout) == {
        "rewards": [1.0, 0.0],
        "parts": {"correctness": [1.0, 0.0]},
        "errors": [],
        "over_budget": ["", ""],
    }
