"""A run is frozen with its config, and resumed only with that one or with changes that do no harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config, load_config, load_resolved, with_overrides
from hpc_grpo.config.load import CONFIGS_DIR as CONFIGS
from hpc_grpo.config.load import read_layers
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch import freeze as freezing
from hpc_grpo.launch.freeze import CHANGEABLE, freeze, is_listed, reconfigured, working_dir
from hpc_grpo.run.chain import ChainRecord, write_chain
from hpc_grpo.run.checkpoint import Manifest, hash_files, write_manifest
from hpc_grpo.run.frozen_config import differences, flat
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import sums_digest
from hpc_grpo.system.secret import secret_keys


def config(root: Path, *overrides: str) -> Config:
    return load_config("local/debug", [f"run.root={root}", *overrides])


def changed_by_the_last(run: RunDir) -> dict[str, Any]:
    """The keys that the last submit or start changed."""
    changed: dict[str, Any] = json.loads(run.source.read_text())["resumed"][-1]["changed"]
    return changed


def test_a_new_run_holds_its_resolved_config_and_where_it_came_from(tmp_path: Path) -> None:
    run = freeze(config(tmp_path), ["hpc-grpo", "train"], ["train.lr=1e-3"])
    assert load_resolved(run.config) == config(tmp_path)
    source = json.loads(run.source.read_text())
    assert (source["argv"], source["overrides"]) == (["hpc-grpo", "train"], ["train.lr=1e-3"])
    assert source["copy"] == sums_digest(run)
    assert working_dir(run) == Path.cwd()


def test_a_relative_root_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = freeze(load_config("local/debug"), [], [])
    assert load_resolved(run.config).run.root == tmp_path / "runs"


def test_the_same_config_resumes_the_run(tmp_path: Path) -> None:
    freeze(config(tmp_path), [], [])
    run = freeze(config(tmp_path), ["again"], [])
    assert changed_by_the_last(run) == {}
    assert json.loads(run.source.read_text())["resumed"][0]["argv"] == ["again"]


def test_a_complete_run_is_over_unless_its_config_extends_it(tmp_path: Path) -> None:
    run = freeze(config(tmp_path, "train.total_steps=9"), [], [])
    assert not freezing.is_over(run, config(tmp_path, "train.total_steps=9"))
    run.complete_marker.touch()
    assert freezing.is_over(run, config(tmp_path, "train.total_steps=9", "launch.num_nodes=2"))
    assert not freezing.is_over(run, config(tmp_path, "train.total_steps=12"))


def test_a_run_that_its_callback_ended_continues_without_the_callback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def stop(step, metrics, evals):\n    return 'enough'\n")
    with_callback = [f"train.on_step={tmp_path}/mine.py:stop", "train.total_steps=9"]
    run = freeze(config(tmp_path, *with_callback), [], [])
    leave_a_step(run)
    run.complete_marker.write_text("step 9\n")
    assert freezing.is_over(run, config(tmp_path, "train.total_steps=9")), "complete by its length"
    run.complete_marker.write_text("step 4\nenough\n")
    assert freezing.is_over(run, config(tmp_path, *with_callback))
    without = reconfigured(run, ["train.on_step=null"])
    assert not freezing.is_over(run, without)
    freeze(without, [], [])
    assert not run.is_complete()


def leave_a_step(run: RunDir) -> None:
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')


def test_another_config_may_not_take_the_name(tmp_path: Path) -> None:
    run = freeze(config(tmp_path), [], [])
    leave_a_step(run)
    before = run.config.read_text()
    with pytest.raises(ConfigError) as caught:
        freeze(config(tmp_path, "train.lr=1e-3", "checkpoint.every=7"), [], [])
    assert "taken by another config" in str(caught.value)
    assert "train.lr: 0.0001 there, 0.001 now" in str(caught.value)
    assert "checkpoint.every" not in str(caught.value)
    assert "What may change in it: train.total_steps, " in str(caught.value)
    assert run.config.read_text() == before


def test_a_run_that_was_refused_takes_the_corrected_config(tmp_path: Path) -> None:
    run = freeze(config(tmp_path, "train.lr=1e-3"), [], [])
    run = freeze(config(tmp_path, "train.lr=1e-4"), [], [])
    assert changed_by_the_last(run) == {"train.lr": [1e-3, 1e-4]}
    assert load_resolved(run.config).train.lr == 1e-4
    (run.checkpoint(0) / "rng").mkdir(parents=True)
    (run.checkpoint(0) / "rng" / "0").touch()
    files = tuple(hash_files(run.checkpoint(0), ["rng/0"]))
    write_manifest(run.checkpoint(0), Manifest(policy_version=0, world_size=1, zero_stage=2, files=files))
    with pytest.raises(ConfigError, match="taken by another config"):
        freeze(config(tmp_path, "train.lr=1e-3"), [], [])  # it would go on with that checkpoint's weights
    shutil.rmtree(run.checkpoint(0))
    write_chain(run, ChainRecord().with_link("7"))
    with pytest.raises(ConfigError, match="taken by another config"):
        freeze(config(tmp_path, "train.lr=1e-3"), [], [])  # job 7 waits to train with the other
    write_chain(run, ChainRecord(ended="The configuration must be changed first.").with_link("7"))
    assert changed_by_the_last(freeze(config(tmp_path, "train.lr=1e-3"), [], []))


def test_keys_that_do_not_change_what_is_learned_may_differ(tmp_path: Path) -> None:
    freeze(config(tmp_path), [], [])
    run = freeze(config(tmp_path, "launch.num_nodes=2", "checkpoint.every=7"), [], [])
    assert sorted(changed_by_the_last(run)) == ["checkpoint.every", "launch.num_nodes"]
    assert load_resolved(run.config).launch.num_nodes == 2


def test_a_longer_run_is_no_longer_complete(tmp_path: Path) -> None:
    run = freeze(config(tmp_path), [], [])
    run.complete_marker.touch()
    freeze(config(tmp_path), [], [])
    assert run.is_complete()
    freeze(config(tmp_path, "train.total_steps=9"), [], [])
    assert not run.is_complete()


def test_a_command_that_was_killed_while_it_extends_a_run_extends_it_when_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, longer = freeze(config(tmp_path, "train.total_steps=9"), [], []), config(tmp_path, "train.total_steps=12")
    leave_a_step(run)
    run.complete_marker.touch()
    rewrite = freezing.rewrite_config

    def killed(*args: Any) -> None:
        rewrite(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(freezing, "rewrite_config", killed)
    with pytest.raises(KeyboardInterrupt):
        freeze(longer, [], [])
    assert not freezing.is_over(run, longer)


@pytest.mark.parametrize("drops", [True, False])
def test_a_limit_that_decides_which_demonstrations_are_dropped_may_not_change(tmp_path: Path, drops: bool) -> None:
    """A resume would number the items differently."""
    sft = [f"run.root={tmp_path}", f"data.drop_long_prompts={drops}"]
    run = freeze(load_config("local/tiny_sft", sft), [], [])
    leave_a_step(run)
    words = ["train.max_tokens_per_microbatch=64", "train.num_threads=1"]
    if not drops:
        assert freeze(reconfigured(run, words), [], []) == run
        return
    said = r"\n  train.max_tokens_per_microbatch: \d+ there, 64 now\n"
    with pytest.raises(ConfigError, match=said) as caught:
        reconfigured(run, words)
    assert "max_tokens" not in str(caught.value).partition("What may change in it: ")[2]
    with pytest.raises(ConfigError, match=said):
        freeze(load_config("local/tiny_sft", [*sft, *words]), [], [])


def test_a_root_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written.*run\.root"):
        freeze(config(tmp_path / "file"), [], [])


def test_a_run_that_trained_resumes_with_another_degree_of_sequence_parallel(tmp_path: Path) -> None:
    run = freeze(config(tmp_path), [], [])
    leave_a_step(run)
    words = ["placement.learners_per_node=2", "train.sequence_parallel=2"]
    run = freeze(reconfigured(run, words), ["hpc-grpo", "submit"], words)
    assert sorted(changed_by_the_last(run)) == ["placement.learners_per_node", "train.sequence_parallel"]


def test_a_run_that_trained_is_reconfigured_where_it_may_change(tmp_path: Path) -> None:
    run = freeze(config(tmp_path), [], [])
    leave_a_step(run)
    words = ["rewards.0.timeout_s=60", "grading.max_failed_fraction=0.5", "train.max_tokens_per_microbatch=64000"]
    run = freeze(reconfigured(run, words), ["hpc-grpo", "submit"], words)
    assert sorted(changed_by_the_last(run)) == [
        "grading.max_failed_fraction",
        "rewards.0.timeout_s",
        "train.max_tokens_per_microbatch",
    ]
    there = load_resolved(run.config)
    assert (there.rewards[0].timeout_s, there.train.max_tokens_per_microbatch) == (60.0, 64000)
    assert json.loads(run.source.read_text())["resumed"][0]["overrides"] == words


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.lr=1", "train.lr: 0.0001 there, 1.0 now"),
        ("rewards.0.weight=2", "rewards.0.weight: "),
        ("rewards.0.args.completion_s=3", "rewards.0.args.completion_s: None there, 3 now"),
        ("train.zero_stage=3", "train.zero_stage: "),
        ("train.max_token_per_microbatch=3", "did you mean 'max_tokens_per_microbatch'?"),
        ("train.max_tokens_per_microbatch=3", "must hold the longest sequence"),
        ("run.name=other", "run.name and run.root say which run it is"),
        ("run.root=/elsewhere", "run.name and run.root say which run it is"),
        ("launch.env.WANDB_API_KEY=abc", "must not hold secrets"),
    ],
)
def test_a_run_is_not_reconfigured_into_another(word: str, told: str, tmp_path: Path) -> None:
    run = freeze(config(tmp_path), [], [])
    leave_a_step(run)
    before = (run.config.read_text(), run.source.read_text())
    with pytest.raises(ConfigError) as caught:
        freeze(reconfigured(run, [word, "engine.vllm.max_num_seqs=9"]), [], [])
    assert told in str(caught.value)
    assert (run.config.read_text(), run.source.read_text()) == before


DEBUG = load_config("local/debug", ["lora.rank=16"])
WITH_CALLBACK = load_config("local/debug", ["train.on_step=mine.py:stop"])


@pytest.mark.parametrize("entry", CHANGEABLE)
def test_every_entry_names_keys_that_exist_and_has_a_reason(entry: str) -> None:
    keys = flat(DEBUG.model_dump(mode="json")) | flat(WITH_CALLBACK.model_dump(mode="json"))
    assert any(is_listed(key, [entry]) for key in keys)
    assert CHANGEABLE[entry]


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("train.total_steps", True),
        ("train.total_steps_more", False),
        ("train.lr", False),
        ("train.zero_stage", False),
        ("train.offload_optimizer", False),
        ("rollout.group_size", False),
        ("placement.learners_per_node", True),
        ("launch.slurm.extra.exclude", True),
        ("rewards.0.timeout_s", True),
        ("rewards.12.timeout_s", True),
        ("rewards.0.args.timeout_s", False),
        ("rewards.0.weight", False),
        ("rewards", False),
    ],
)
def test_a_key_may_change_only_where_the_table_has_it(key: str, may: bool) -> None:
    assert is_listed(key, CHANGEABLE) is may


def test_a_difference_inside_a_list_of_sections_names_the_item() -> None:
    one = with_overrides(DEBUG, ["rewards=[{name: correctness}]"])
    other = with_overrides(one, ["rewards.0.timeout_s=60", "train.adamw.betas=[0.8, 0.9]"])
    assert differences(one, other) == {
        "rewards.0.timeout_s": (10.0, 60.0),
        "train.adamw.betas": ([0.9, 0.95], [0.8, 0.9]),
    }
    two = with_overrides(one, ["rewards=[{name: correctness}, {name: strict_format}]"])
    assert differences(one, two)["rewards.1.name"] == (None, "strict_format")


def with_reward(root: Path, arguments: dict[str, Any]) -> Config:
    """A config with a reward of the user's own, which takes any arguments."""
    rewards = [{"name": "my_rewards:score", "args": arguments}]
    return config(root, f"rewards={json.dumps(rewards)}", "eval.reward=my_rewards:score")


def test_a_secret_in_launch_env_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        freeze(config(tmp_path, "launch.env.WANDB_API_KEY=abc"), [], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("launch.env.JUDGE=https://me:hunter2hunter2@judge:1", "JUDGE"),
        ("launch.env.SLACK_WEBHOOK_URL=https://x.y/z", "SLACK_WEBHOOK_URL"),
        ('launch.setup_lines=["module load x", "export PGPASS=hunter2"]', "launch.setup_lines.1"),
        ('launch.setup_lines=["export https_proxy=http://me:hunter2@proxy:1"]', "launch.setup_lines.0"),
        ('launch.notify=["curl", "https://hooks.slack.com/services/T0/B0/xyz"]', "launch.notify"),
        ("launch.slurm.extra.comment=ghp_abcdefghijklmnopqrstuvwxyz0123456789", "launch.slurm.extra.comment"),
        ('launch.notify=["env", "NTFY_KEY=hunter2", "notify-send"]', "launch.notify.1"),
        ('launch.notify=["send", "--token", "hunter2"]', "launch.notify"),
        ('launch.notify=["curl", "-H", "Authorization: Bearer hunter2hunter2", "https://x.y"]', "launch.notify.2"),
        ('launch.notify=["curl", "-u", "me:hunter2", "https://x.y"]', "launch.notify"),
        (
            'launch.reward_server={"command": ["vllm", "serve", "m", "--api-key", "hunter2"], "health_url": "http://h"}',
            "launch.reward_server.command",
        ),
        (
            'launch.container={"engine": "podman", "image": "i", "args": ["--env=HF_TOKEN=hunter2"]}',
            "launch.container.args.0",
        ),
        ("launch.slurm.extra.export=ALL,HF_TOKEN=hunter2", "launch.slurm.extra.export"),
        ('launch.setup_lines=["wandb login 0123456789abcdef0123456789abcdefhunter2"]', "launch.setup_lines.0"),
        ("data.train.path=https://me:hunter2@host/train.jsonl", "data.train.path"),
    ],
)
def test_a_secret_anywhere_in_the_config_is_refused_and_not_told(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match="must not hold secrets") as refused:
        freeze(config(tmp_path, override), [], [])
    assert key in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("hunter2", "hooks.slack", "ghp_abc", "x.y/z"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")))
def test_no_shipped_config_raises_an_alarm(name: str) -> None:
    assert secret_keys(read_layers(CONFIGS / name)) == []


def test_a_setup_line_that_reads_a_secret_where_it_is_needed_is_taken(tmp_path: Path) -> None:
    lines = ['export HF_TOKEN="$(cat ~/.token)"', "export HF_TOKEN_PATH=/home/me/token"]
    freeze(config(tmp_path, f"launch.setup_lines={json.dumps(lines)}"), [], [])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"judge_api_key": "sk-0123456789abcdef0123"}, "judge_api_key"),
        ({"judge_key": "c0ffee0123456789c0ffee0123456789"}, "judge_key"),
        ({"judge": {"headers": {"token": "3f2504e0-4f89-11d3-9a0c-0305e82c3301"}}}, "judge.headers.token"),
        ({"tokens": ["hf_abcdefghijklmnopqrstuv"]}, "tokens.0"),
        ({"password": "hunter2"}, "password"),
        ({"headers": {"Authorization": "Bearer hunter2"}}, "headers.Authorization"),
        ({"url": "https://judge.site/?api_key=hunter2"}, "url"),
    ],
)
def test_a_secret_in_the_arguments_of_a_reward_is_refused_and_not_told(
    tmp_path: Path, arguments: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match="must not hold secrets") as caught:
        freeze(with_reward(tmp_path, arguments), [], [])
    assert f" rewards.0.args.{key}." in str(caught.value)
    assert not any(part in str(caught.value) for part in ("0123456789", "11d3", "hf_", "hunter2"))


def test_arguments_of_a_reward_that_are_named_like_a_secret_are_taken(tmp_path: Path) -> None:
    arguments = {
        "pass_k": 8,
        "pass_rate": "pass_rate_of_llama_8b",
        "answer_key": "reference_solution_2024",
        "json_key": "final_answer.value.normalized",
        "stop_token": "<|end_of_text|>",
        "token": "</s>",
        "keys": ["intermediate_steps", "final_conclusion"],
    }
    freeze(with_reward(tmp_path, arguments), [], [])
