from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.data.cache import Row, RowCache
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.owner import SHARED_VARIABLE
from tests.support.configs import minimal_config
from tests.support.second_user import give_to_second_user
from tests.support.streams import loaded, write_items

ROWS = [Row(f"text {i}", [i, i + 1], [7] * (i % 3), f'{{"n": {i}}}', 2**64 - 1 - i) for i in range(2500)]
ITEMS = [{"question": f"{i}?", "answer": str(i)} for i in range(6)]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    cache = RowCache(tmp_path / "cache")
    assert cache.find({"of": 1}) is None
    cache.write({"of": 1}, iter(ROWS))
    rows = cache.find({"of": 1})
    assert rows is not None
    assert (len(rows), rows[0], rows[1999], rows[2499]) == (2500, ROWS[0], ROWS[1999], ROWS[2499])
    assert rows.num_tokens.tolist() == [2 + i % 3 for i in range(2500)]
    assert int(rows.prompt_hashes[3]) == 2**64 - 4
    assert cache.find({"of": 2}) is None


def test_of_two_writers_at_once_both_read_whole_rows_and_one_entry_stays(tmp_path: Path) -> None:
    both_have_begun, found = threading.Barrier(2), []

    def rows() -> Iterator[Row]:
        both_have_begun.wait(30)
        yield from ROWS

    def write() -> None:
        found.append(RowCache(tmp_path).write({"of": 1}, rows()))

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [(len(each), each[2499]) for each in found] == [(2500, ROWS[2499])] * 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("inside", ["", "rows.arrow", "made.json"])
@pytest.mark.parametrize("by", ["mode", "owner"])
def test_rows_that_another_user_may_write_are_refused(
    tmp_path: Path, inside: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED_VARIABLE, raising=False)
    cache = RowCache(tmp_path / "cache")
    cache.write({"of": 1}, iter(ROWS))
    (entry,) = cache.folder.iterdir()
    entry.chmod(0o755)
    if by == "mode":
        (entry / inside).chmod(0o777)
    else:
        give_to_second_user(entry / inside)
    with pytest.raises(ConfigError, match=r"change what a run trains on"):
        cache.find({"of": 1})
    monkeypatch.setenv(SHARED_VARIABLE, "1")
    assert cache.find({"of": 1}) is not None


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield ROWS[0]
        raise ConfigError("a bad row")

    with pytest.raises(ConfigError, match="a bad row"):
        RowCache(tmp_path).write({"of": 1}, rows())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rows.arrow", "made.json"])
def test_a_damaged_entry_is_made_anew(name: str, tmp_path: Path) -> None:
    cache = RowCache(tmp_path)
    file = cache.write({"of": 1}, iter(ROWS)).folder / name
    file.write_bytes(file.read_bytes()[:-9])
    assert cache.find({"of": 1}) is None
    assert cache.write({"of": 1}, iter(ROWS))[5] == ROWS[5]


def test_an_entry_that_is_no_arrow_file_is_named(tmp_path: Path) -> None:
    rows = RowCache(tmp_path).write({"of": 1}, iter(ROWS)).folder / "rows.arrow"
    rows.write_bytes(b"x" * rows.stat().st_size)
    with pytest.raises(ConfigError, match=r"cannot be read .* Delete the folder"):
        RowCache(tmp_path).find({"of": 1})


def test_what_a_cleaner_cannot_look_into_is_left_alone(tmp_path: Path) -> None:
    stray = tmp_path / ".another.tmp"
    stray.touch()
    assert len(RowCache(tmp_path).write({"of": 1}, iter(ROWS))) == len(ROWS)
    assert stray.exists()


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir"):
        RowCache(tmp_path / "file").write({"of": 1}, iter(ROWS))


def test_items_are_tokenized_once_and_again_when_file_or_template_change(
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def texts(**data: Any) -> list[str]:
        settings = {"train": {"path": "d.jsonl"}, "template": "plain", "shuffle": False, **data}
        train = loaded(minimal_config(data=settings), make_tokenizer()).train
        return [train.prompt(ordinal).text for ordinal in range(len(train))]

    def times_tokenized() -> int:
        return capfd.readouterr().err.count("Tokenized")

    write_items("d.jsonl", ITEMS)
    assert texts() == [item["question"] for item in ITEMS]
    assert times_tokenized() == 1
    assert len(texts(drop_long_prompts=True, max_prompt_tokens=100)) == 6
    assert times_tokenized() == 0
    assert texts(prompt_format="Q: {prompt}")[0] == "Q: 0?"
    assert times_tokenized() == 1
    write_items("d.jsonl", ITEMS[::-1])
    assert texts()[0] == "5?"
    assert times_tokenized() == 1
    write_items("d.jsonl", ITEMS)
    assert texts()[0] == "0?"
    assert times_tokenized() == 0
