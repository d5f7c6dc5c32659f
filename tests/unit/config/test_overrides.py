"""KEY=VALUE on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from tests.unit.config.files import MINIMAL, error_of, load, write


def test_an_override_has_the_type_that_yaml_gives_it(minimal: Path) -> None:
    config = load(
        minimal,
        "train.lr=3e-5",
        "train.adamw.betas=[0.9, 0.99]",
        "data.shuffle=false",
        "model.dtype=float32",
        "train.num_threads=null",
        "launch.env={A: b}",
        "run.name=a=b",
    )
    assert (config.train.lr, config.train.adamw["betas"], config.data.shuffle) == (3e-5, (0.9, 0.99), False)
    assert (config.model.dtype, config.train.num_threads, config.launch.env) == ("float32", None, {"A": "b"})
    assert config.run.name == "a=b"


def test_plus_equals_extends_the_list_of_the_files_and_of_earlier_overrides(tmp_path: Path, minimal: Path) -> None:
    write(tmp_path / "site.yaml", {"launch": {"setup_lines": ["ulimit -l unlimited"]}})
    run = write(tmp_path / "run.yaml", {**MINIMAL, "base": "site.yaml"})
    added = "launch.setup_lines+=['export A=1', 'export B=2']"
    assert load(run, added).launch.setup_lines == ["ulimit -l unlimited", "export A=1", "export B=2"]
    assert load(run, "launch.setup_lines=[echo]", added).launch.setup_lines == ["echo", "export A=1", "export B=2"]
    assert load(minimal, added).launch.setup_lines == ["export A=1", "export B=2"]


@pytest.mark.parametrize("override", ["launch.setup_lines+=one", "train.lr+=[1]", "run.name+=[x]"])
def test_plus_equals_without_two_lists_is_an_error(minimal: Path, override: str) -> None:
    assert f"Override {override!r}: += appends a list to a list" in error_of(minimal, "train.lr=1", override)


def test_a_walltime_with_colons_stays_text_and_is_no_number_of_minutes(minimal: Path) -> None:
    assert load(minimal, "launch.slurm.extra.begin=24:00:00").launch.slurm.extra == {"begin": "24:00:00"}
    with pytest.raises(ConfigError, match=r"launch\.slurm\.time_min.*24:00:00"):
        load(minimal, "launch.slurm.time_min=24:00:00")
    assert load(minimal, "launch.slurm.time_min=1440").launch.slurm.time_min == 1440


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", ".000001", "0.000001"])
def test_every_way_to_write_a_learning_rate_is_a_number(minimal: Path, text: str) -> None:
    assert load(minimal, f"train.lr={text}").train.lr == 1e-6


def test_numbers_in_the_arguments_of_a_reward_are_numbers(minimal: Path) -> None:
    rewards = "rewards=[{name: 'own:f', args: {tolerance: 1e-3, unit: e-mail, steps: [1e2]}}]"
    assert load(minimal, rewards).rewards[0].args == {"tolerance": 1e-3, "unit": "e-mail", "steps": [100.0]}


@pytest.mark.parametrize("text", ["'1e5'", "'12e4567890'", "1e5abc", "4e2f", "2024-01-01-a"])
def test_text_that_looks_like_a_number_stays_text(minimal: Path, text: str) -> None:
    """A commit's hash, for one."""
    assert load(minimal, f"run.name={text}").run.name == text.strip("'")


def test_a_whole_number_may_have_an_exponent(minimal: Path) -> None:
    assert load(minimal, "train.total_steps=1e3").train.total_steps == 1000


def test_an_override_with_a_position_changes_that_item_of_a_list(tmp_path: Path) -> None:
    rewards = [{"name": "correctness"}, {"name": "strict_format", "weight": 0.5}]
    path = write(tmp_path / "c.yaml", {**MINIMAL, "rewards": rewards, "data": {"train": {"mix": [{"path": "a"}]}}})
    config = load(path, "rewards.1.weight=0.25", "rewards.1.args.answer_tag=final", "data.train.mix.0.weight=2")
    assert [reward.weight for reward in config.rewards] == [1.0, 0.25]
    assert config.rewards[1].args == {"answer_tag": "final"}


def test_an_override_of_one_of_two_equal_items_changes_that_one(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", {**MINIMAL, "train": {"total_steps": 3, "adamw": {"betas": [0.9, 0.9]}}})
    assert load(path, "train.adamw.betas.1=0.95").train.adamw["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("index", ["2", "-1", "x", "²"])
def test_an_override_beyond_a_list_is_an_error_with_the_positions(tmp_path: Path, index: str) -> None:
    path = write(tmp_path / "c.yaml", {**MINIMAL, "rewards": [{"name": "a"}, {"name": "b"}]})
    message = error_of(path, f"rewards.{index}.weight=1")
    assert f"{index!r} must be a position from 0 to 1" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr", "must have the form key.path=value"),
        ("=1", "must have the form key.path=value"),
        ("run.name.first=x", "run.name is a value, not a section"),
        ("train.lr=[1", "not valid YAML"),
    ],
)
def test_a_malformed_override_is_an_error_with_the_form(minimal: Path, override: str, words: str) -> None:
    assert words in error_of(minimal, override)
