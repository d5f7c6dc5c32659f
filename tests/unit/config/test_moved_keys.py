"""Keys of before: an error that names the key of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_grpo.config import Config, LaunchConfig, load_launch, load_resolved_launch
from hpc_grpo.config.load import overridden
from hpc_grpo.config.moved import _MOVED, _REMOVED, explain_moved
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.run.chain import ChainRecord, read_chain
from hpc_grpo.run.paths import RunDir
from tests.unit.config.files import MINIMAL, error_of

OLD = """\
task: ppo
ppo: {critic: critics/a, value_clip: 0.3}
checkpoint: {every_steps: null, every_s: null}
eval: {every_epochs: 2}
engine: {enforce_eager: true, ngram_tokens: 3}
launch: {slurm: {num_nodes: 3}}
weights: {num_buffers: 2}
"""


def test_each_old_key_in_a_file_is_an_error_that_names_the_new_one(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + OLD)
    message = error_of(minimal)
    for line in (
        "ppo.critic is now task.critic: set task.critic=critics/a instead.",
        "ppo.value_clip is now task.value_clip: set task.value_clip=0.3 instead.",
        "checkpoint.every_steps is now checkpoint.every: set checkpoint.every=null, or epochs or seconds alone.",
        "eval.every_epochs is now eval.every: set eval.every='2 epochs' instead.",
        "checkpoint.every_s is now checkpoint.every: leave it out.",
        "engine.enforce_eager is now engine.vllm.enforce_eager: set engine.vllm.enforce_eager=true instead.",
        "set engine.vllm.speculative_config='{method: ngram, num_speculative_tokens: 3}' instead.",
        "launch.slurm.num_nodes is now launch.num_nodes: set launch.num_nodes=3 instead.",
        "weights.num_buffers is no key any more, but always 1. Leave it out.",
    ):
        assert line in message


@pytest.mark.parametrize("old", [*_MOVED, *_REMOVED])
def test_an_old_key_in_an_override_is_an_error_whose_advice_loads(minimal: Path, old: str) -> None:
    texts = {"critic": "a", "teacher": "a", "field": "a", "project": "a", "entity": "a", "mode": "offline"}
    value = texts.get(re.split(r"[._]", old)[-1], "1")
    line = next(explain_moved(old, value))
    assert line in error_of(minimal, f"{old}={value}")
    if advice := re.search(r" set (\S+)=('?)(.*)\2 instead", line):
        section = old.partition(".")[0]
        task = section if section in ALGORITHMS.names() else "grpo"
        Config.model_validate(overridden(MINIMAL, [f"task={task}", f"{advice[1]}={advice[3]}"]))


def test_an_old_key_in_a_sites_file_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {slurm: {partition: workq, num_nodes: 3}}\n")
    with pytest.raises(ConfigError, match=r"launch\.slurm\.num_nodes is now launch\.num_nodes: set launch"):
        load_launch(str(tmp_path / "site.yaml"))


def test_a_run_directory_without_a_launch_section_has_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    assert load_resolved_launch(tmp_path / "config.yaml") == LaunchConfig()


def test_a_chain_record_keeps_the_form_that_it_has_always_had(tmp_path: Path) -> None:
    """A job of a 2-node run wrote it before the rename; follow-on jobs ask for as many nodes."""
    run = RunDir(tmp_path)
    run.chain.write_text('{"links": [], "successor": "", "ended": "", "slurm": {"num_nodes": 2, "time_min": 90}}')
    had = read_chain(run).launch(LaunchConfig(num_nodes=1))
    assert (had.num_nodes, had.slurm.time_min) == (2, 90)
    assert ChainRecord().asking_for(had).slurm["num_nodes"] == 2
    assert ChainRecord().asking_for(had).launch(LaunchConfig()) == had
