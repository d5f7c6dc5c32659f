"""What a run reads is compared with what it read at its first start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.frozen_config import accept_changes, read_inputs, refuse_changed, take_inputs
from hpc_grpo.run.paths import RunDir

BEGUN = {"data.train.path": {"train.jsonl": "7 bytes"}, "model.path": {"tokenizer.json": "8 bytes"}}
CHANGED = {**BEGUN, "model.path": {"tokenizer.json": "8 bytes", "chat_template.jinja": "9 bytes"}}


def begun(tmp_path: Path) -> RunDir:
    """A run that has taken its inputs and one step."""
    run = RunDir(tmp_path)
    take_inputs(run, BEGUN)
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    return run


def test_a_run_that_has_not_trained_takes_changed_inputs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    take_inputs(run, BEGUN)
    take_inputs(run, CHANGED)
    record = read_inputs(run)
    assert record.fingerprints == CHANGED
    assert record.accepted[0]["changed"] == {"model.path, chat_template.jinja": ["not there", "9 bytes"]}


def test_a_change_is_refused_with_what_changed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    take_inputs(run, BEGUN)
    with pytest.raises(ConfigError, match=r"model\.path, chat_template\.jinja: not there at the start, 9 bytes now"):
        take_inputs(run, CHANGED)
    assert read_inputs(run).fingerprints == BEGUN


def test_a_change_that_is_accepted_is_recorded_and_holds_for_one_start(tmp_path: Path) -> None:
    run = begun(tmp_path)
    accept_changes(run, ["hpc-grpo", "submit", "--accept-changes"])
    refuse_changed(run, CHANGED)
    take_inputs(run, CHANGED)
    record = read_inputs(run)
    assert record.fingerprints == CHANGED
    assert record.accepted[0]["argv"] == ["hpc-grpo", "submit", "--accept-changes"]
    assert record.accepted[0]["changed"] == {"model.path, chat_template.jinja": ["not there", "9 bytes"]}
    with pytest.raises(ConfigError):
        take_inputs(run, BEGUN)


def test_an_input_that_only_one_start_has_is_no_change(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    take_inputs(run, BEGUN)
    with_eval = {**BEGUN, "data.eval.path": {"eval.jsonl": "5 bytes"}}
    take_inputs(run, with_eval)
    take_inputs(run, BEGUN)
    assert read_inputs(run).fingerprints == with_eval
