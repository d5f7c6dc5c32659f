from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from hpc_grpo.config import Config, load_launch, load_resolved, to_yaml
from hpc_grpo.config.load import find_config
from hpc_grpo.config.train import PpoArgs, PpoTask, SftArgs, SftTask, Task
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.section import OWN, variants
from tests.support.configs import minimal_config
from tests.unit.config.files import MINIMAL, error_of, load, write


def test_the_least_config_has_the_documented_defaults(minimal: Path) -> None:
    config = load(minimal)
    assert (config.task.name, config.engine.engines_per_node, config.rollout.max_policy_lag) == ("grpo", 3, 0)
    assert [reward.name for reward in config.rewards] == ["correctness"]
    assert config.run_path == Path.cwd() / "runs" / "tiny"
    assert config.max_model_len == 512 + 256


@pytest.mark.parametrize(("root", "below"), [("~/my runs", "/home/me/my runs"), ("/a/runs", "/a/runs"), ("b", None)])
def test_the_root_of_runs_is_absolute_from_the_start(
    root: str, below: str | None, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(minimal, f"run.root={root}").run_path == Path(below or Path.cwd() / "b") / "tiny"


def test_a_root_below_the_home_of_nobody_is_an_error_with_the_fix(minimal: Path) -> None:
    error = error_of(minimal, "run.root=~nobody-of-this-name/runs")
    assert "run.root = '~nobody-of-this-name/runs'" in error
    assert "Give the full path" in error


def test_the_python_of_the_jobs_is_a_whole_path(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(minimal).launch.python is None
    assert load(minimal, "launch.python=~/my env/bin/python").launch.python == "/home/me/my env/bin/python"
    assert load(minimal, "launch.python=/env/bin/python").launch.python == "/env/bin/python"


@pytest.mark.parametrize("python", ["python3", "env/bin/python", "''"])
def test_a_python_that_is_no_absolute_path_is_an_error_with_the_fix(python: str, minimal: Path) -> None:
    error = error_of(minimal, f"launch.python={python}")
    assert f"launch.python = {python.strip(chr(39))!r}: " in error
    assert "must be an absolute path" in error
    assert "Give the full path of a Python, such as /" in error


def test_a_python_below_the_home_of_nobody_is_an_error_with_the_fix(minimal: Path) -> None:
    error = error_of(minimal, "launch.python=~nobody-of-this-name/python")
    assert "launch.python = '~nobody-of-this-name/python'" in error
    assert "Give the full path" in error


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr=fast", "train.lr = 'fast': must be a number."),
        ("train.lr=-1", "train.lr = -1: must be greater than 0."),
        ("rollout.group_size=2.5", "rollout.group_size = 2.5: must be a whole number."),
        ("data.shuffle=maybe", "data.shuffle = 'maybe': must be true or false."),
        ("rollout.stop=end", "rollout.stop = 'end': must be a list, such as [VALUE]."),
        ("model=Qwen", "model = 'Qwen': must be a section: keys with values, such as {path: Qwen}."),
        ("run=mine", "run = 'mine': must be a section: keys with values, such as {name: mine}."),
        ("run=name:mine", "run = 'name:mine': must be a section: keys with values, with a space after the colon: name"),
        ("data=a.jsonl", "data = 'a.jsonl': must be a section: keys with values, such as {train: {path: a.jsonl}}."),
        ("rewards=length", "rewards = 'length': must be a list, such as [{name: length}]."),
        ("rewards=[length]", "rewards.0 = 'length': must be a section: keys with values, such as {name: length}."),
        ("rollout.group_size=1", "rollout.group_size = 1: must be at least 2."),
        ("run.name=5", "run.name = 5: must be a text in quotes. In a shell: 'run.name=\"5\"'."),
        ("eval.every=0", "or several: '50 steps, 30 min', or null."),
        ("run.name=[5]", "run.name = [5]: must be a text."),
        ("run={name: t, root: {a: 1}}", "run.root = {'a': 1}: must be a path."),
        ("task=5", "task = 5: must be a name, or a section with a name. Built in: grpo, ppo, distill, sft."),
        ("run.root=null", "run.root = null: must be a path."),
        ("launch.slurm.time_min=24:00:00", "'24:00:00': must be a whole number. Meaning: Walltime in minutes."),
        (
            "lora=true",
            "lora = True: must be a section: keys with values, such as {rank: 16}, or null. Valid here: rank, ",
        ),
        ("eval=true", "eval = True: must be a section: keys with values, such as {every: VALUE}. Valid here: every, "),
        ("loss.kl=0.1", "loss.kl = 0.1: must be a section: keys with values, such as {coef: 0.1}. Valid here: coef, "),
        ("rewards=true", "rewards = True: must be a list, such as [{name: VALUE}]."),
        ("metrics.wandb=true", "metrics.wandb = True: must be a section: keys with values, such as {project: VALUE}."),
    ],
)
def test_an_error_says_what_a_value_must_be(minimal: Path, override: str, says: str) -> None:
    assert says in error_of(minimal, override)


def test_an_override_of_a_length_takes_the_place_of_the_files_length(minimal: Path) -> None:
    train = load(minimal, "train.total_epochs=2").train
    assert (train.total_steps, train.total_epochs) == (None, 2)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.learning_rate=1", "train.learning_rate: unknown key"),
        ("task=stf", "task.name = stf does not exist; did you mean 'sft'? Built in: grpo, ppo, distill, sft."),
        ("task.args.critic_lr=1", "task.args: task.name = grpo has no such key"),
        ("train.num_minibatch=2", "did you mean 'num_minibatches'?"),
        ("launch.slurm.partion=x", "did you mean 'partition'?"),
        ("data.eval={path: x, max_item: 3}", "did you mean 'max_items'?"),
        ("rewards=[{name: correctness, wieght: 2}]", "rewards.0.wieght: unknown key; did you mean 'weight'?"),
        ("environment={name: g.py:G, max_steps: 3}", "environment.max_steps: unknown key; did you mean 'max_turns'?"),
        ("rolout.group_size=4", "did you mean 'rollout'?"),
        ("train.zero=3", "train.zero: unknown key; did you mean 'zero_stage'?"),
        ("launch.slurm.qos=long", "qos: unknown key; an option of sbatch is launch.slurm.extra.qos. Valid here: "),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_and_all_valid_ones(
    minimal: Path, override: str, nearest: str
) -> None:
    message = error_of(minimal, override)
    assert nearest in message
    assert any(each in message for each in ("Valid here:", "Built in:", "It has:"))


def test_a_wrong_value_is_an_error_with_the_choices(minimal: Path) -> None:
    message = error_of(minimal, "model.dtype=float16", "rollout.group_size=1")
    assert "model.dtype = 'float16'" in message
    assert "'float32' or 'bfloat16'" in message
    assert "rollout.group_size = 1" in message


def test_a_missing_section_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", {key: value for key, value in MINIMAL.items() if key != "model"})
    assert "model: must be set." in error_of(path)


@pytest.mark.parametrize(("content", "words"), [("a: [", "not valid YAML"), ("- a", "holds a list"), ("", "is empty")])
def test_a_file_without_keys_and_values_is_an_error(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert words in error_of(path)


def test_bases_are_merged_in_order_below_the_file(tmp_path: Path) -> None:
    write(tmp_path / "site" / "site.yaml", {"launch": {"interface": "hsn0", "env": {"A": "1", "B": "1"}}})
    write(tmp_path / "common.yaml", {**MINIMAL, "base": "site/site.yaml", "train": {"total_steps": 9, "lr": 1e-4}})
    write(tmp_path / "other.yaml", {"train": {"lr": 2e-4}})
    path = write(
        tmp_path / "c.yaml",
        {"base": ["common.yaml", "other.yaml"], "train": {"total_steps": 5}, "launch": {"env": {"B": "2"}}},
    )
    config = load(path)
    assert (config.train.total_steps, config.train.lr, config.run.name) == (5, 2e-4, "tiny")
    assert config.launch.interface == "hsn0"
    assert config.launch.env == {"A": "1", "B": "2"}


def test_a_list_replaces_the_list_of_the_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", {**MINIMAL, "rewards": [{"name": "a"}, {"name": "b"}]})
    path = write(tmp_path / "c.yaml", {"base": "base.yaml", "rewards": [{"name": "correctness"}]})
    assert [reward.name for reward in load(path).rewards] == ["correctness"]


def test_a_base_that_does_not_exist_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", {**MINIMAL, "base": "nowhere.yaml"})
    assert "base 'nowhere.yaml' does not exist" in error_of(path)


@pytest.mark.parametrize("base", [5, ["site.yaml", 5], {"path": "site.yaml"}])
def test_a_base_that_is_no_file_name_is_an_error(tmp_path: Path, base: Any) -> None:
    write(tmp_path / "site.yaml", {})
    assert "must be a file, or a list of files" in error_of(write(tmp_path / "c.yaml", {**MINIMAL, "base": base}))


def test_no_base_may_be_written_as_null(tmp_path: Path) -> None:
    assert load(write(tmp_path / "c.yaml", {**MINIMAL, "base": None})) == load(write(tmp_path / "d.yaml", MINIMAL))


def test_bases_that_lead_back_to_a_file_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", {**MINIMAL, "base": "site.yaml"})
    write(tmp_path / "site.yaml", {"base": "c.yaml"})
    assert "base 'c.yaml' has site.yaml among its own bases" in error_of(path)


@pytest.mark.parametrize(("given", "shown"), [("3", "3"), ("true", "True"), ("node1", "'node1'")])
def test_hosts_that_are_no_list_are_an_error(minimal: Path, given: str, shown: str) -> None:
    assert f"launch.hosts = {shown}: must be a list" in error_of(minimal, f"launch.hosts={given}")


def test_a_shipped_config_is_found_by_its_name() -> None:
    assert find_config("local/debug").name == "debug.yaml"
    assert find_config("local/debug.yaml") == find_config("local/debug")


def test_a_name_close_to_a_shipped_one_is_an_error_that_gives_it() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local/debug'"):
        find_config("local/debgu")


@pytest.mark.parametrize(
    ("above", "overrides", "task"),
    [
        ({}, [], PpoTask(args=PpoArgs(critic_lr=1e-3))),
        (
            {"task": {"args": {"gae_lambda": 1.0}}},
            ["task.args.discount=0.5"],
            PpoTask(args=PpoArgs(critic_lr=1e-3, gae_lambda=1.0, discount=0.5)),
        ),
        ({"task": "sft"}, [], SftTask()),
        ({}, ["task=sft", "task.args.batch_size=4"], SftTask(args=SftArgs(batch_size=4))),
    ],
)
def test_a_bare_task_replaces_that_of_the_base_and_a_section_adds_keys(
    above: dict[str, Any], overrides: list[str], task: Task, tmp_path: Path
) -> None:
    write(tmp_path / "base.yaml", {**MINIMAL, "task": {"name": "ppo", "args": {"critic_lr": 1e-3}}})
    assert load(write(tmp_path / "c.yaml", {"base": "base.yaml", **above}), *overrides).task == task


def test_each_algorithm_has_a_section_of_keys() -> None:
    assert sorted(variants(get_args(Task)[0])) == sorted([*ALGORITHMS.names(), OWN])


def test_a_resolved_config_loads_to_an_equal_one(minimal: Path, tmp_path: Path) -> None:
    rewards = "rewards=[{name: 'own:f', args: {x: 1e-3, y: '1e-3'}}]"
    config = load(minimal, "train.lr=1e-6", rewards, "launch.env={A: b}", "run.name='1e5'")
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(config))
    assert load_resolved(resolved) == config
    assert to_yaml(load_resolved(resolved)) == to_yaml(config)


def test_a_resolved_config_has_every_key(minimal: Path) -> None:
    values = yaml.safe_load(to_yaml(load(minimal)))
    assert set(values) == set(Config.model_fields)
    assert values["train"]["max_grad_norm"] == 1.0


def test_a_loaded_config_cannot_be_changed(minimal: Path) -> None:
    config = load(minimal)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_a_launch_section_alone_is_checked_like_a_whole_config(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("launch: {nodes: 3}\n")
    with pytest.raises(ConfigError, match=r"launch\.nodes: unknown key; did you mean 'num_nodes'"):
        load_launch(str(tmp_path / "bad.yaml"))


def test_a_task_of_the_users_own_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert minimal_config(task="mine.py:Mine").task.name == f"{tmp_path}/mine.py:Mine"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("checkpoint.every=5 moons", "checkpoint.every = '5 moons': must be such as '50 steps'"),
        ("checkpoint.every=1 epoch, 2 epochs", "must be such as"),
        ("eval.every=1.5 steps", "must be such as"),
        ("train.adamw.betas=[0.9,2]", "train.adamw.betas.1 = 2: must be less than 1"),
        ("train.adamw.beta=1", "train.adamw = {'beta': 1}: has no 'beta'. It has: betas, eps, weight_decay"),
        ("engine.vllm={max_num_batched_tokens: 0}", "engine.vllm.max_num_batched_tokens = 0"),
        ("metrics.wandb={id: a}", "id is set by hpc-grpo: remove it here"),
        ("metrics.wandb.mode=off", "metrics.wandb.mode = False"),
        (
            "engine.vllm={max_model_len: 9}",
            "max_model_len is set by data.max_prompt_tokens and rollout.max_new_tokens",
        ),
        ("engine.vllm.spec_tokens=2", "spec_tokens is set by engine.vllm.speculative_config"),
        ("engine.vllm.data_parallel_size=2", "data_parallel_size is set by hpc-grpo: remove it here"),
        ("engine.vllm.tokenizer_mode=slow", "tokenizer_mode is set by model.path"),
        ("engine.vllm.enable_return_routed_experts=true", "is set by train.router_replay"),
        ("engine.vllm.max_loras=2", "max_loras is set by hpc-grpo: remove it here"),
        ("engine.vllm.quantization=fp8", "quantization is set by engine.dtype"),
        ("engine.vllm.speculative_config={method: eagle, num_speculative_tokens: 1}", "'ngram'"),
    ],
)
def test_a_text_or_an_argument_that_cannot_be_taken_is_an_error_with_what_can(
    minimal: Path, override: str, words: str
) -> None:
    assert words in error_of(minimal, override)
