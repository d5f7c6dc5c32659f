from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_grpo.report.logs import follow, tail
from tests.support.command import call
from tests.support.run_builder import RunBuilder


class StillFollowingError(Exception):
    """Nothing more will happen, and the logs are still followed."""


def followed(
    built: RunBuilder, *events: Callable[[], object], node: str | None = None, attempt: int | None = None
) -> list[str]:
    """Return what is shown before the first event and after each; the last one may end the run."""
    shown, coming = [""], list(events)

    def sleep(_seconds: float) -> None:
        if not coming:
            raise StillFollowingError
        shown.append("")
        coming.pop(0)()

    with suppress(StillFollowingError):
        for text in follow(built.run, node=node, attempt=attempt, num_lines=2, sleep=sleep):
            shown[-1] += text
    return shown


def test_it_starts_with_the_end_and_goes_on_with_what_comes(built: RunBuilder) -> None:
    record = built.attempt(1)
    built.log(record, "a\nb\nc\n")
    shown = followed(built, lambda: None, lambda: built.log(record, "d"))
    assert shown == ["==> attempts/1-11/driver.log <==\nb\nc\n", "", "d"]


def test_it_reads_the_rest_before_it_switches_to_the_next_attempts(built: RunBuilder) -> None:
    def two_more() -> None:
        built.log(built.attempt(2), "2 begins\n")
        built.log(built.attempt(3), "3 begins\n")
        built.log(first, "the end of 1\n")

    first = built.attempt(1)
    assert followed(built, two_more)[1] == (
        "==> attempts/1-11/driver.log <==\nthe end of 1\n"
        "\n==> attempts/2-12/driver.log <==\n2 begins\n"
        "\n==> attempts/3-13/driver.log <==\n3 begins\n"
    )


def test_a_chosen_attempt_is_not_left_and_followed_until_it_has_ended(built: RunBuilder) -> None:
    def second() -> None:
        built.log(built.attempt(2), "2\n")
        built.log(first, "1\n")

    first = built.attempt(1)
    built.hold(1)
    assert followed(built, second, lambda: None, attempt=1) == ["", "==> attempts/1-11/driver.log <==\n1\n"]


def test_it_waits_for_the_first_attempt_and_joins_a_character_that_comes_in_two_parts(built: RunBuilder) -> None:
    def write(data: bytes) -> None:
        with (built.folder(built.attempt(1)) / "driver.log").open("ab") as file:
            file.write(data)

    halves = "é".encode()
    shown = followed(built, lambda: write(halves[:1]), lambda: write(halves[1:]))
    assert (shown[:2], shown[2][-1]) == (["", ""], "é")


def test_a_nodes_logs_are_followed_across_attempts_without_it(built: RunBuilder) -> None:
    def attempt(number: int, *nodes: str) -> None:
        folder = built.folder(built.attempt(number)) / "nodes"
        for node in nodes:
            (folder / node).mkdir(parents=True)
            (folder / node / "agent.log").write_text(f"{node} of {number}\n")

    attempt(1, "n1", "n2")
    shown = followed(built, lambda: attempt(2, "n2"), lambda: attempt(3, "n1"), node="n1")
    assert shown == [
        "==> attempts/1-11/nodes/n1/agent.log <==\nn1 of 1\n",
        "",
        "\n==> attempts/3-13/nodes/n1/agent.log <==\nn1 of 3\n",
    ]


def test_following_goes_on_while_the_next_job_waits_and_ends_after_the_last_line_of_a_run(built: RunBuilder) -> None:
    def last_attempt() -> None:
        built.log(built.attempt(2, "complete"), "COMPLETE\n")
        built.run.complete_marker.touch()

    built.log(built.attempt(1, "resumable"), "one\n")
    built.chain("11", "12", successor="12")
    shown = followed(built, last_attempt, lambda: None)
    assert (len(shown), shown[-1]) == (2, "\n==> attempts/2-12/driver.log <==\nCOMPLETE\n")


def test_the_command_follows_a_run_until_it_is_over(built: RunBuilder) -> None:
    built.log(built.attempt(1, "crash"), "one\x1b[2J\n")
    assert call("logs", "-f", "adder").stdout == "==> attempts/1-11/driver.log <==\none\n"


@pytest.mark.parametrize(
    ("text", "num_lines", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\rb\nc\n", 2, "a\rb\nc\n"),
        ("a\n", 5, "a\n"),
        ("a\n", 0, ""),
        ("", 3, ""),
        ("x" * 200_000 + "\nlast\n", 1, "last\n"),
        ("".join(f"{n:07}\n" for n in range(50_000)), 20_000, "".join(f"{n:07}\n" for n in range(30_000, 50_000))),
    ],
)
def test_tail_returns_the_last_lines(tmp_path: Path, text: str, num_lines: int, expected: str) -> None:
    (tmp_path / "log").write_text(text, newline="")
    assert tail(tmp_path / "log", num_lines) == expected


def test_tail_reads_no_more_than_max_bytes(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", 5) == ""
    (tmp_path / "log").write_text("x" * 10_000_000)
    assert len(tail(tmp_path / "log", 5, max_bytes=100_000)) == 100_000
