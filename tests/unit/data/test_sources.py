from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.encoder import check_item
from hpc_grpo.data.sources import open_source, read_items
from hpc_grpo.errors import ConfigError

ITEMS = [{"question": f"{i} + 1?", "answer": str(i + 1), "level": i} for i in range(5)]


def write_lines(path: Path, lines: list[str]) -> SourceConfig:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return SourceConfig(path=str(path))


def load_items(config: SourceConfig) -> list[dict[str, Any]]:
    items = list(read_items(config))
    for number, item in enumerate(items):
        check_item(config, item, number)
    return items


def message_of(config: SourceConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_items(config)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_jsonl_keeps_order_and_all_columns(tmp_path: Path) -> None:
    config = write_lines(tmp_path / "d.jsonl", [json.dumps(item) for item in ITEMS])
    assert list(load_items(config)) == ITEMS


def test_jsonl_skips_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    config = write_lines(tmp_path / "d.jsonl", ["\ufeff" + json.dumps(ITEMS[0]), "", json.dumps(ITEMS[1]), ""])
    assert list(load_items(config)) == ITEMS[:2]


def test_the_byte_of_a_broken_first_line_counts_the_byte_order_mark(tmp_path: Path) -> None:
    config = write_lines(tmp_path / "d.jsonl", ["\ufeff" + '{"question": x}'])
    assert "line 1, byte 16: not valid JSON" in message_of(config)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "depth"])
@pytest.mark.parametrize(("name", "where"), [("d.jsonl", "line 2, byte 3"), ("d.json", "d.json")])
def test_json_that_python_refuses_to_read_is_named(tmp_path: Path, name: str, where: str, value: str) -> None:
    item = f'{{"question": {value}}}'
    config = write_lines(tmp_path / name, ["{}", item] if name == "d.jsonl" else [f"[{item}]"])
    assert f"{where}: a number has more than 4300 digits, or brackets" in message_of(config)


def test_broken_line_after_a_million_bytes_is_named(tmp_path: Path) -> None:
    good = json.dumps({"question": "é" * 500, "answer": "1"}, ensure_ascii=False)
    num_good = 1_000_000 // len(f"{good}\n".encode()) + 1
    broken = '{"question": "éé", "answer": }'
    config = write_lines(tmp_path / "d.jsonl", [good] * num_good + [broken, good])
    offset = num_good * len(f"{good}\n".encode())
    position = offset + len('{"question": "éé", "answer": '.encode())
    assert offset > 1_000_000
    message = message_of(config)
    assert f"line {num_good + 1}, byte {position}: not valid JSON (Expecting value)" in message
    assert str(tmp_path / "d.jsonl") in message
    assert (tmp_path / "d.jsonl").read_bytes()[position : position + 1] == b"}"


def test_max_items_stops_before_a_broken_line(tmp_path: Path) -> None:
    config = write_lines(tmp_path / "d.jsonl", [json.dumps(ITEMS[0]), "{"])
    assert len(load_items(config.model_copy(update={"max_items": 1}))) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", 'line 2, byte 50: must be a JSON object such as {"question": "…", "answer": "…"}, not list. The name'),
        (b'{"question": "\xff"}', "line 2, byte 64: not valid UTF-8"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(ITEMS[0]).encode() + b"\n" + line + b"\n")
    assert words in message_of(SourceConfig(path=str(path)))


def test_missing_file_says_where_it_looked(tmp_path: Path) -> None:
    assert str(tmp_path / "no.jsonl") in message_of(SourceConfig(path=str(tmp_path / "no.jsonl")))


def test_missing_field_names_item_and_the_fields_that_exist(tmp_path: Path) -> None:
    config = write_lines(tmp_path / "d.jsonl", [json.dumps(ITEMS[0]), json.dumps({"question": "a", "b": 1})])
    message = message_of(config)
    assert "item 1" in message
    assert "'answer' (answer_field)" in message
    assert "question, b" in message
    assert "null" in message
    assert len(load_items(config.model_copy(update={"answer_field": None}))) == 2


def test_messages_field_replaces_the_prompt_field(tmp_path: Path) -> None:
    item = {"messages": [{"role": "user", "content": "hi"}], "answer": "1"}
    config = write_lines(tmp_path / "d.jsonl", [json.dumps(item)])
    assert "prompt_field" in message_of(config)
    assert list(load_items(config.model_copy(update={"messages_field": "messages"}))) == [item]


def test_json_array(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps(ITEMS, indent=1))
    assert list(load_items(SourceConfig(path=str(path), max_items=3))) == ITEMS[:3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1}', "must hold a JSON array of objects, not dict"),
        ("[1]", "item 0: must be a JSON object, not int"),
        ('{"a": 1}\n{"a": 2}\n', "name it .jsonl"),
        ('[\n{"a": 1},\n{"a": }]', "line 3: not valid JSON"),
    ],
)
def test_json_mistakes(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "d.json").write_text(content)
    assert words in message_of(SourceConfig(path=str(tmp_path / "d.json")))


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("question,answer\n")
    assert ".jsonl" in message_of(SourceConfig(path=str(tmp_path / "d.csv")))


def test_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ITEMS).save_to_disk(tmp_path / "saved")
    items = load_items(SourceConfig(path=str(tmp_path / "saved"), max_items=2))
    assert [items[0], items[1]] == ITEMS[:2]
    assert len(items) == 2
    message = message_of(SourceConfig(path=str(tmp_path / "saved"), prompt_field="prompt"))
    assert "question, answer, level" in message


def test_saved_data_set_with_splits(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ITEMS)
    datasets.DatasetDict({"train": table, "test": table.select([4])}).save_to_disk(tmp_path / "saved")
    assert list(load_items(SourceConfig(path=str(tmp_path / "saved"), split="test"))) == ITEMS[4:]
    message = message_of(SourceConfig(path=str(tmp_path / "saved"), split="dev"))
    assert "no split 'dev'" in message
    assert "train, test" in message


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.arrow", "rows.py:items"])
def test_a_file_is_not_read_as_a_split_of_itself(tmp_path: Path, name: str) -> None:
    """An eval on `split: test` of the training file would be an eval on the training data."""
    message = message_of(SourceConfig(path=str(tmp_path / name), split="test"))
    assert "only a folder or a name of the hub has splits. Leave split = test out" in message


def test_a_saved_split_is_not_read_as_another(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    datasets.Dataset.from_list(ITEMS, split=datasets.Split.VALIDATION).save_to_disk(path)
    assert "holds split validation, not test. Leave split out" in message_of(SourceConfig(path=path, split="test"))
    assert load_items(SourceConfig(path=path, split="validation")) == load_items(SourceConfig(path=path)) == ITEMS


def test_hub_name_is_loaded_by_path_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ITEMS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    items = load_items(SourceConfig(path="openai/gsm8k", subset="main", split="test"))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "trust_remote_code": False})]
    assert items[4] == ITEMS[4]


def test_a_folder_that_does_not_exist_is_not_sought_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone': there is no .*/gone. Give a path that exists") as caught:
        list(read_items(SourceConfig(path=f"{tmp_path}/gone")))
    assert "offline" not in str(caught.value)


def test_hub_name_offline_gives_the_command_to_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = message_of(SourceConfig(path="openai/gsm8k", subset="main"))
    assert "ConnectionError: Couldn't reach the Hub" in message
    assert "datasets.load_dataset('openai/gsm8k', 'main', split='train')" in message
    assert "login node" in message


ROWS: list[dict[str, Any]] = [{"question": f"{i}?", "answer": str(i), "at": date(2025, 1, 1)} for i in range(2500)]


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
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
    assert list(read_items(config)) == ROWS
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
    assert [item["question"] for item in items] == [item["question"] for item in ROWS]


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


@pytest.mark.parametrize("task", ["ransom_note", "bf"])
def test_a_reasoning_gym_task_gives_the_same_items_in_every_process(task: str) -> None:
    """ransom_note goes through sets of texts: each hash seed would give others. bf prints to stdout."""
    config = SourceConfig(path=f"reasoning_gym:{task}", args={"size": 4, "seed": 1})
    first = list(read_items(config))
    assert [set(item) for item in first] == [{"question", "answer", "task", "task_args", "metadata"}] * 4
    assert list(read_items(config)) == first
    assert json.loads(first[0]["metadata"])["source_dataset"] == task


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
