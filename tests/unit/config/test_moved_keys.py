"""Keys of before: an error that names the key of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_grpo.cli.request import load_request
from hpc_grpo.config import Config, LaunchConfig, load_launch
from hpc_grpo.config.load import overridden
from hpc_grpo.config.moved import _EVERY, _MOVED, _REMOVED, explain_moved
from hpc_grpo.config.train import DistillArgs, PpoArgs
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

READERS = {
    "loss.correction.low": "loss.correction=sequence_mask", "loss.correction.cap": "loss.correction=sequence",
    **{f"task.{key}": "task=ppo" for key in PpoArgs.model_fields}, "task.batch_size": "task=sft",
    **{f"task.{key}": "task=distill" for key in DistillArgs.model_fields},
    "loss.temperature_positive": "loss=sapo", "loss.temperature_negative": "loss=sapo", "loss.fraction": "loss=kl_cov",
    "loss.kl_coef": "loss=kl_cov", "loss.low": "loss=clip_cov", "loss.high": "loss={name: clip_cov, args: {low: 0.5}}",
    "environment.tools": "environment.name=tools", "rewards.completion_s": "rewards=[{name: math}]",
    "loss.advantage.discount": "loss.advantage=turns", "loss.advantage.k": "loss.advantage=pass_k",
}  # fmt: skip
"""Keys of before -> what reads them, if the default does not."""


def test_each_old_key_in_a_file_is_an_error_that_names_the_new_one(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + OLD)
    message = error_of(minimal)
    for line in (
        "ppo.critic is now task.args.critic: set task.args.critic=critics/a instead.",
        "ppo.value_clip is now task.args.value_clip: set task.args.value_clip=0.3 instead.",
        "checkpoint.every_steps and checkpoint.every_s are now checkpoint.every: set checkpoint.every=null instead.",
        "eval.every_epochs is now eval.every: set eval.every='2 epochs' instead.",
        "engine.enforce_eager is now engine.vllm.enforce_eager: set engine.vllm.enforce_eager=true instead.",
        "set engine.vllm.speculative_config='{method: ngram, num_speculative_tokens: 3}' instead.",
        "launch.slurm.num_nodes is now launch.num_nodes: set launch.num_nodes=3 instead.",
        "weights.num_buffers was removed. Its fixed value is 1. Leave it out.",
    ):
        assert line in message


@pytest.mark.parametrize("old", [*_EVERY, *_MOVED, *_REMOVED])
def test_an_old_key_in_an_override_is_an_error_whose_advice_loads(minimal: Path, old: str) -> None:
    texts = {
        **dict.fromkeys(("critic", "teacher", "field", "project", "entity"), "a"),
        "mode": "offline",
        "template": "a.jinja",
        "fraction": "0.5",
        "tools": "[python]",
        "betas": "[0.8, 0.9]",
        "clip": "2",
    }
    value = texts.get(re.split(r"[._]", old)[-1], "1")
    readers = [READERS[old]] if old in READERS else []
    old, name = old.replace("rewards.", "rewards.0."), old.rpartition(".")[2]
    line = next(explain_moved(old, value, {name: value}, [f"args.{name}"]))
    assert line in error_of(minimal, *readers, f"{old}={value}")
    if advice := re.search(r" set (\S+)=('?)(.*)\2 instead", line):
        section = old.partition(".")[0]
        names = [f"task={section}"] if section in ALGORITHMS.names() else []
        Config.model_validate(overridden(MINIMAL, [*names, *readers, f"{advice[1]}={advice[3]}"]))


def test_an_old_key_of_a_source_is_an_error_that_names_the_sources_new_key(minimal: Path) -> None:
    line = "data.train.environment.args.tools: set data.train.environment.args.tools='[python, a:b]' instead."
    assert line in error_of(minimal, "data.train.environment={name: tools, tools: [python, 'a:b']}")


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (
            ("checkpoint.every_s=600",),
            "every_s is now checkpoint.every: set checkpoint.every='50 steps, 600 s'",
        ),
        (("checkpoint.every=5", "checkpoint.every_s=600"), "checkpoint.every='5 steps, 600 s'"),
        (("checkpoint.every=soon", "checkpoint.every_epochs=1"), "checkpoint.every='50 steps, 1 epochs'"),
        (("checkpoint.every_steps=null", "checkpoint.every_s=600"), "checkpoint.every='600 s'"),
        (("eval.every_steps=20", "eval.every_s=600"), "eval.every='20 steps, 600 s'"),
        (("checkpoint.export_every_s=null",), "checkpoint.export_every=null"),
    ],
)
def test_units_that_were_keys_are_one_advice_with_what_held_beside_them(
    minimal: Path, overrides: tuple[str, ...], advice: str
) -> None:
    message = error_of(minimal, *overrides)
    assert f"{advice} instead." in message
    assert message.count("now") == 1


def test_an_old_key_is_not_said_to_be_another_systems(minimal: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_request(str(minimal), ["metrics.wandb_project=a"])
    assert str(caught.value).splitlines()[1:] == [
        "  metrics.wandb_project is now metrics.wandb.project: set metrics.wandb.project=a instead."
    ]


def test_an_old_key_in_a_sites_file_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {slurm: {partition: workq, num_nodes: 3}}\n")
    with pytest.raises(ConfigError, match=r"launch\.slurm\.num_nodes is now launch\.num_nodes: set launch"):
        load_launch(str(tmp_path / "site.yaml"))


def test_a_chain_record_keeps_the_form_that_it_has_always_had(tmp_path: Path) -> None:
    """A job of a 2-node run wrote it before the rename; follow-on jobs ask for as many nodes."""
    run = RunDir(tmp_path)
    run.chain.write_text('{"links": [], "successor": "", "ended": "", "slurm": {"num_nodes": 2, "time_min": 90}}')
    had = read_chain(run).launch(LaunchConfig(num_nodes=1))
    assert (had.num_nodes, had.slurm.time_min) == (2, 90)
    assert ChainRecord().asking_for(had).slurm["num_nodes"] == 2
    assert ChainRecord().asking_for(had).launch(LaunchConfig()) == had
