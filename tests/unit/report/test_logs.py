from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.report.logs import LogFollower, follow, tail
from tests.support.command import call
from tests.support.run_builder import RunBuilder


def follower(built: RunBuilder, node: str | None = None, attempt: int | None = None) -> LogFollower:
    return LogFollower(built.run, node=node, attempt=attempt, num_lines=2)


def test_it_starts_with_the_end_and_goes_on_with_what_comes(built: RunBuilder) -> None:
    record = built.attempt(1)
    built.log(record, "a\nb\nc\n")
    following = follower(built)
    assert [following.read(), following.read()] == ["==> attempts/1-11/driver.log <==\nb\nc\n", ""]
    built.log(record, "d")
    assert following.read() == "d"


def test_it_reads_the_rest_before_it_switches_to_the_next_attempt(built: RunBuilder) -> None:
    first = built.attempt(1)
    following = follower(built)
    built.log(first, "the end of 1\n")
    second = built.attempt(2)
    assert [following.read(), following.read()] == ["==> attempts/1-11/driver.log <==\nthe end of 1\n", ""]
    built.log(second, "2 begins\n")
    built.log(built.attempt(3), "3 begins\n")
    assert following.read() == "\n==> attempts/2-12/driver.log <==\n2 begins\n"
    assert following.read() == "\n==> attempts/3-13/driver.log <==\n3 begins\n"


def test_a_chosen_attempt_is_not_left(built: RunBuilder) -> None:
    first = built.attempt(1)
    built.hold(1)
    following = follower(built, attempt=1)
    assert not following.is_over()
    built.log(built.attempt(2), "2\n")
    built.log(first, "1\n")
    assert [following.read(), following.read()] == ["==> attempts/1-11/driver.log <==\n1\n", ""]
    assert following.is_over()


def test_it_waits_for_the_first_attempt_and_joins_a_character_that_comes_in_two_parts(built: RunBuilder) -> None:
    following = follower(built)
    assert (following.read(), following.is_over()) == ("", False)
    record = built.attempt(1)
    with (built.folder(record) / "driver.log").open("ab", buffering=0) as file:
        file.write("é".encode()[:1])
        assert following.read() == ""
        file.write("é".encode()[1:])
    assert following.read().endswith("é")


def test_a_nodes_logs_are_followed_across_attempts_without_it(built: RunBuilder) -> None:
    for number in (1, 2, 3):
        folder = built.folder(built.attempt(number)) / "nodes"
        for node in ("n1", "n2") if number != 2 else ("n2",):
            (folder / node).mkdir(parents=True)
            (folder / node / "agent.log").write_text(f"{node} of {number}\n")
    assert follower(built, node="n1").read().endswith("n1 of 3\n")
    of_first = follower(built, node="n1", attempt=1)
    assert of_first.read() == "==> attempts/1-11/nodes/n1/agent.log <==\nn1 of 1\n"


def test_following_ends_after_the_last_line_of_a_complete_run(built: RunBuilder) -> None:
    record = built.attempt(1)
    built.hold(1)
    built.log(record, "step 1\n")

    def finish(_seconds: float) -> None:
        built.log(record, "COMPLETE\n")
        built.attempt(1, "complete")
        built.run.holder.unlink()
        built.run.complete_marker.touch()

    assert "".join(follow(follower(built), sleep=finish)).endswith("step 1\nCOMPLETE\n")


def test_following_goes_on_while_the_next_job_waits(built: RunBuilder) -> None:
    built.log(built.attempt(1, "resumable"), "one\n")
    built.chain("11", "12", successor="12")
    naps = []

    def next_attempt(seconds: float) -> None:
        naps.append(seconds)
        built.log(built.attempt(2, "crash"), "two\n")
        built.chain("11", "12", ended="2 jobs have been used.")

    assert "".join(follow(follower(built), sleep=next_attempt)).endswith("two\n")
    assert len(naps) == 1


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
