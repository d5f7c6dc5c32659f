from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources import open_source, read_items
from hpc_grpo.errors import ConfigError

ITEMS: list[dict[str, Any]] = [{"question": f"{i}?", "answer": str(i), "at": date(2025, 1, 1)} for i in range(2500)]


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ITEMS), path)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ITEMS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ITEMS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


@pytest.mark.parametrize(
    ("name", "write"),
    [("d.parquet", write_parquet), ("d.arrow", write_arrow_file), ("d.arrow", write_arrow_stream)],
)
def test_a_table_gives_all_rows_in_order_and_changes_its_identity_with_its_content(
    name: str, write: Any, tmp_path: Path
) -> None:
    write(tmp_path / name)
    config = SourceConfig(path=str(tmp_path / name))
    assert list(read_items(config)) == ITEMS
    assert len(list(read_items(config.model_copy(update={"max_items": 7})))) == 7
    before = open_source(config).identity()
    with (tmp_path / name).open("ab") as file:
        file.write(b"x")
    assert open_source(config).identity() != before


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_file_that_is_no_table_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("question,answer\n")
    with pytest.raises(ConfigError, match=rf"{name} cannot be read as (Parquet|Arrow)"):
        list(read_items(SourceConfig(path=str(tmp_path / name))))


def test_arguments_that_nobody_takes_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match="args are for a function or a task"):
        open_source(SourceConfig(path=str(tmp_path / "d.parquet"), args={"size": 3}))


def test_a_folder_named_like_a_file_is_read_by_datasets(tmp_path: Path) -> None:
    """Spark and Dask write folders of parts."""
    (tmp_path / "d.parquet").mkdir()
    write_parquet(tmp_path / "d.parquet" / "part-0.parquet")
    items = list(read_items(SourceConfig(path=str(tmp_path / "d.parquet"))))
    assert [item["question"] for item in items] == [item["question"] for item in ITEMS]


def test_a_function_of_ones_own_is_called_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rows(n):\n    for i in range(n):\n        yield {'question': str(i)}\n")
    config = SourceConfig(path=f"{tmp_path}/mine.py:rows", args={"n": 3})
    assert [item["question"] for item in read_items(config)] == ["0", "1", "2"]
    assert open_source(config).identity() is None


@pytest.mark.parametrize(
    ("body", "words"),
    [("yield 3", "item 0: must be a dict of columns, not int"), ("yield {}; 1 / 0", "failed: ZeroDivisionError")],
)
def test_a_function_that_fails_is_a_config_error(body: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(ConfigError, match=words):
        list(read_items(SourceConfig(path=f"{tmp_path}/mine.py:rows")))


def test_a_reasoning_gym_task_gives_the_same_items_in_every_process() -> None:
    """ransom_note goes through sets of texts: each hash seed would give others."""
    config = SourceConfig(path="reasoning_gym:ransom_note", args={"size": 4, "seed": 1})
    first = list(read_items(config))
    assert [set(item) for item in first] == [{"question", "answer", "task", "task_args", "metadata"}] * 4
    assert list(read_items(config)) == first
    assert json.loads(first[0]["metadata"])["source_dataset"] == "ransom_note"


@pytest.mark.parametrize(
    ("path", "args", "words"),
    [
        ("reasoning_gym:gdc", {}, "There is no task 'gdc'; did you mean 'gcd'?"),
        ("reasoning_gym:gcd", {"sizes": 3}, "TypeError"),
    ],
)
def test_a_task_or_argument_that_does_not_exist_is_named(path: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(read_items(SourceConfig(path=path, args=args)))
    assert words in str(caught.value)
