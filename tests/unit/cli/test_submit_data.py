"""Rows that submit refuses before it queues a job, by their line or their number."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import Result
from pyarrow import parquet as pq

from hpc_grpo.errors import EXIT_CONFIG
from tests.support.command import call
from tests.support.places import FakeQueue

ROW = '{"question": "What is 1+1?", "answer": "2"}\n'


def submit(*words: str) -> Result:
    """Submit a run on rows.jsonl of this folder, which names nothing else on this machine."""
    named = ("model.path=org/m", "data.train.path=rows.jsonl", "eval.every=null")
    return call("submit", "local/debug", *named, *words)


BAD_FIRST_ROWS = {
    "broken": ('\n{"question": "q"\n' + ROW, [], "rows.jsonl, line 2, byte 18: not valid JSON"),
    "no object": ("[1]\n", [], "rows.jsonl, line 1, byte 0: must be a JSON object"),
    "no prompt": (
        '{"qustion": "q", "answer": "a"}\n',
        [],
        "there is no field 'question' (prompt_field). Fields: qustion",
    ),
    "no answer": (ROW, ["data.train.answer_field=gold"], "there is no field 'gold' (answer_field)"),
    "no completion": (ROW, ["task=sft", "rollout={}", "data.train.answer_field=reply"], "'reply' (answer_field)"),
    "empty": ("\n", [], "rows.jsonl is empty"),
}


@pytest.mark.parametrize("case", BAD_FIRST_ROWS)
def test_data_that_begins_with_a_bad_row_is_refused(case: str, queue: FakeQueue, tmp_path: Path) -> None:
    text, words, message = BAD_FIRST_ROWS[case]
    (tmp_path / "rows.jsonl").write_text(text)
    result = submit(*words)
    assert (result.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert message in result.stderr
    assert result.stderr.count("error: ") == 1


def test_an_eval_of_few_prompts_is_told_how_wide_its_interval_is(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW * 8)
    (tmp_path / "one.jsonl").write_text(ROW)
    sets = ["data.eval.path=one.jsonl", "data.eval_sets.few={path: rows.jsonl, max_items: 7}"]
    pq.write_table(pa.Table.from_pylist([{"question": "q", "answer": "a"}] * 2), tmp_path / "two.parquet")
    evals = ["data.eval_sets.more={path: rows.jsonl}", "data.eval_sets.hub={path: org/held_out}", "eval.every=1 steps"]
    sets.append("data.eval_sets.columns={path: two.parquet}")
    told = (
        "data.eval has 1 prompt: the 95% interval of its pass@1 can be 0.79 wide. With 100 prompts it is at most 0.19."
        "\ndata.eval_sets.few has 7 prompts: the 95% interval of its pass@1 can be 0.59 wide. With 100 prompts it is "
        "at most 0.19.\ndata.eval_sets.columns has 2 prompts"
    )
    result = submit(*sets, *evals)
    assert result.exit_code == 0, result.stderr
    assert told in result.stderr and "eval_sets.more" not in result.stderr and "eval_sets.hub" not in result.stderr
    planned = call("plan", "local/debug", "--size", "0.5B", "data.train.path=rows.jsonl", *sets, *evals)
    assert told in planned.stderr
    assert "interval" not in submit(*sets, "--dry-run").stderr  # nobody evaluates


def test_what_few_rows_hold_out_is_told_too(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(ROW.replace("1+1", f"{number}+1") for number in range(12)))
    held_out = submit("data.eval=null", "data.held_out=0.4", "eval.every=1 steps", "--dry-run").stderr
    assert re.match(r"data.held_out has [2-7] prompts: the 95% interval", held_out)
    assert "interval" not in submit("data.eval=null", "data.held_out=0.4", "--dry-run").stderr  # nobody evaluates


def test_an_eval_set_that_cannot_be_read_does_not_end_a_dry_run(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    result = submit("data.eval={path: rows.jsonl, args: {a: 1}}", "eval.every=1 steps", "--dry-run")
    assert "#SBATCH" in result.stdout, result.stderr
    assert "args are for a function" in result.stderr


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "rows.jsonl, line 4, byte"),
        ('{"question": "q", "answer": null}', "Item 2 of {path} (counted from 0): 'answer' (answer_field) is null"),
        ('{"question": " ", "answer": "a"}', "Item 2 of {path} (counted from 0) has an empty prompt"),
        ('{"question": "a\\ud83d", "answer": "a"}', "Item 2 of {path} (counted from 0) holds '\\ud83d'"),
        ('{"question": "q", "answer": "\\ud83d"}', "Item 2 of {path} (counted from 0) holds '\\ud83d'"),
    ],
)
def test_a_bad_row_anywhere_is_refused_by_its_number(row: str, message: str, queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"\n{ROW}{ROW}{row}\n{ROW}")
    result = submit()
    assert (result.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert message.format(path=tmp_path / "rows.jsonl") in result.stderr


@pytest.mark.parametrize("name", [None, "README.md", "rows.py", "config.json"])
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_folder_without_a_data_set_is_refused(
    name: str | None, words: list[str], queue: FakeQueue, tmp_path: Path
) -> None:
    (tmp_path / "rows" / "train").mkdir(parents=True)
    if name is not None:
        (tmp_path / "rows" / "train" / name).touch()
    result = submit("data.train.path=./rows", *words)
    assert (result.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert f"Data set {tmp_path}/rows: the folder must hold a file that ends in .parquet," in result.stderr
    assert result.stderr.count("error: ") == 1


@pytest.mark.parametrize("name", ["train/part.jsonl", "PART.CSV", "part.json.gz", "dataset_dict.json"])
def test_a_folder_with_a_data_set_is_taken(name: str, queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows" / "train").mkdir(parents=True)
    (tmp_path / "rows" / name).write_text(ROW)
    assert submit("data.train.path=./rows").exit_code == 0


def test_data_is_judged_without_packages_that_a_light_installation_lacks() -> None:
    program = "import sys, hpc_grpo.preflight.inputs, hpc_grpo.config\n"
    program += "print(sorted(set(sys.modules) & {'numpy', 'torch', 'ray', 'datasets', 'transformers'}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
