"""Files are published whole or not at all, read although a crash cut them, and wait for a full disk."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_grpo.run.files import (
    drop_torn_line,
    is_damaged,
    publish_dir,
    read_jsonl,
    read_record,
    recover_dirs,
    start_staging,
    wait_for_space,
    when_there_is_space,
    write_atomic,
    write_json_atomic,
    write_record,
)


def test_write_atomic_makes_folders_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "state.json"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


def test_write_atomic_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_sets_the_mode_before_the_content_is_there(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_atomic(path, "secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture(params=["link", "file"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What another user made under each name that a file could be written to before it is published: a link or a file.

    Returns the file that must not be touched: the link's target, or a file that everybody may read.
    """
    precious = tmp_path / "precious"
    precious.write_text("another's")
    precious.chmod(0o644)
    folder = tmp_path / "shared"
    folder.mkdir()
    guesses = [f".token.{os.getpid()}.tmp", ".token.tmp", "token.tmp", f".token.{os.getpid()}"]
    for guess in guesses:
        if request.param == "link":
            (folder / guess).symlink_to(precious)
        else:
            os.link(precious, folder / guess)
    return precious


def test_write_atomic_goes_through_nothing_that_another_user_planted(planted: Path) -> None:
    path = planted.parent / "shared" / "token"
    write_atomic(path, "secret", mode=0o600)
    assert planted.read_text() == "another's"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "secret"


def test_write_atomic_opens_no_file_that_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _bytes: "guessed")
    (tmp_path / ".token.guessed.tmp").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "token", "secret", mode=0o600)
    assert not (tmp_path / "target").exists()


def test_write_json_atomic_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json_atomic(path, {"a": [1, None, "ü"]})
    assert json.loads(path.read_text()) == {"a": [1, None, "ü"]}


def test_read_jsonl_skips_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 2}]
    assert list(read_jsonl(tmp_path / "absent")) == []


@pytest.mark.parametrize("content", ["", "a\n", "a\nb\n"])
def test_dropping_a_torn_line_keeps_whole_ones(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    drop_torn_line(path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("content", "left"), [("a\nb", "a\n"), ("b", ""), ("b" * 200_000, ""), ("a\n" + "b" * 200_000, "a\n")]
)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, content: str, left: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    drop_torn_line(path)
    assert path.read_text() == left
    drop_torn_line(tmp_path / "absent")


def test_a_published_folder_appears_at_once_and_replaces_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints" / "step_5"
    for text in ("first", "second"):
        staging = start_staging(final)
        (staging / "sub").mkdir()
        (staging / "sub" / "file").write_text(text)
        assert not final.exists() or (final / "sub" / "file").read_text() == "first"
        publish_dir(final)
        assert (final / "sub" / "file").read_text() == text
    assert [path.name for path in final.parent.iterdir()] == ["step_5"]


def test_staging_removes_what_an_interrupted_attempt_left(tmp_path: Path) -> None:
    final = tmp_path / "step_5"
    (start_staging(final) / "half").write_text("written")
    assert list(start_staging(final).iterdir()) == []


def folder(path: Path, content: str) -> None:
    path.mkdir()
    (path / "file").write_text(content)


def test_a_kill_while_staging_leaves_the_old_folder(tmp_path: Path) -> None:
    folder(tmp_path / "step_1", "old")
    folder(tmp_path / ".step_1.tmp", "half")
    recover_dirs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_kill_between_the_two_renames_leaves_the_old_folder(tmp_path: Path) -> None:
    folder(tmp_path / ".step_1.old", "old")
    folder(tmp_path / ".step_1.tmp", "whole, but not known to be")
    recover_dirs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert (tmp_path / "step_1" / "file").read_text() == "old"


def test_a_kill_before_the_old_folder_was_removed_leaves_the_new_one(tmp_path: Path) -> None:
    folder(tmp_path / "step_1", "new")
    folder(tmp_path / ".step_1.old", "old")
    recover_dirs(tmp_path)
    assert (tmp_path / "step_1" / "file").read_text() == "new"
    assert not (tmp_path / ".step_1.old").exists()


def test_recovering_a_folder_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    recover_dirs(tmp_path / "checkpoints")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_is_repeated_until_it_fits(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    failures = [OSError(number, os.strerror(number))] * 3

    def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    assert when_there_is_space(write, "metrics.jsonl", retry_s=0.0) == "written"
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"{os.strerror(number)}: metrics.jsonl cannot be written. The run waits for space; free some, and the run "
        "continues."
    ]


def test_a_full_disk_may_also_be_that_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = [OSError(errno.ENOSPC, "full")]

    def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    written = ""
    with suppress(OSError), Path("/dev/full").open("w") as output:  # it cannot be closed in order
        monkeypatch.setattr(sys, "stdout", output)
        written = when_there_is_space(write, "metrics.jsonl", retry_s=0.0)
    assert written == "written"


def test_an_error_that_is_not_a_full_disk_is_raised() -> None:
    def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        when_there_is_space(write, "metrics.jsonl", retry_s=0.0)


def test_waiting_for_space_ends_when_there_is_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = [500, 1000, 1100]
    wait_for_space(tmp_path, 1000, "A checkpoint", lambda _: free.pop(0), retry_s=0.0)
    assert free == []
    assert capsys.readouterr().out.startswith("A checkpoint needs 0.00 GiB in ")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "torn": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content.replace(b"4", b"5", 1),
    "not text": lambda content: b"\xff" + content[1:],
    "another value": lambda content: b"[]\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_reads_as_one_that_is_not_there(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_record(path, {"step": 4})
    assert read_record(path, dict) == {"step": 4}
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert is_damaged(path)
    assert read_record(path, dict) is None


@pytest.mark.parametrize("damage", [*DAMAGE, "removed"])
def test_a_damaged_record_of_a_fact_is_read_from_its_copy(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    write_record(path, {"step": 4}, keep_copy=True)
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert read_record(path, dict) == {"step": 4}


def test_a_record_from_before_there_were_digests_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 4}')
    assert read_record(tmp_path / "state.json", dict) == {"step": 4}
    assert read_record(tmp_path / "state.json", lambda values: values["missing"]) is None
    assert read_record(tmp_path / "none.json", dict) is None


def test_lines_that_a_disk_changed_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step\xff": 2}\n[3]\n{"step": 4\n{"step": 5}\n')
    assert [line["step"] for line in read_jsonl(path)] == [1, 5]


def test_a_record_whose_keys_are_numbers_is_read_back_whole(tmp_path: Path) -> None:
    """As JSON has them: text, in another order than that of the numbers."""
    path = tmp_path / "record.json"
    write_record(path, {"steps": {2: "a", 10: "b"}})
    assert read_record(path, dict) == {"steps": {"2": "a", "10": "b"}}
