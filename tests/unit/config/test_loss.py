"""Section `loss` and the sections of tasks: papers' defaults, and what a variant or a task does not have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.config import Config, load_config, load_resolved, to_yaml, with_overrides
from hpc_grpo.config.describe import describe
from hpc_grpo.config.load import load_values
from hpc_grpo.config.rules import check_rules
from hpc_grpo.errors import ConfigError
from tests.support.configs import loss_of, minimal_config

LEAST: dict[str, Any] = {
    "run": {"name": "test"},
    "model": {"path": "m"},
    "data": {"train": {"path": "d.jsonl"}},
    "train": {"total_steps": 1},
}
TASKS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"task": "ppo"},
    "distill": {"task": {"name": "distill", "args": {"teacher": "t"}}},
    "sft": {"task": "sft"},
}
FOREIGN: dict[str, dict[str, Any]] = {
    "loss": {"kl": {"coef": 0.1}},
}


def load(*overrides: str, **sections: Any) -> Config:
    return load_values(copy.deepcopy({**LEAST, **sections}), overrides, "this")


def refusal(*overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **sections)
    assert caught.value.exit_code == 78
    return str(caught.value)


OF_DR_GRPO = {"name": "group", "normalize_std": False, "args": {"unbiased_std": True, "eps": 1e-4}}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "dapo"}, {"clip_low": 0.2, "clip_high": 0.28, "denominator": "tokens"}),
        ({"name": "dapo", "clip_high": 0.5}, {"clip_low": 0.2, "clip_high": 0.5}),
        ({"name": "dr_grpo"}, {"denominator": "constant", "advantage": OF_DR_GRPO}),
        ({"name": "dr_grpo", "advantage": "group"}, {"advantage": OF_DR_GRPO}),
        ({"name": "dr_grpo", "advantage": "rloo"}, {"advantage": {"name": "rloo"}}),
        ({"name": "gspo", "denominator": "tokens"}, {"denominator": "tokens", "clip_high": 4e-4}),
        ({"name": "gspo_token"}, {"denominator": "sequences", "clip_low": 3e-4}),
        ({"name": "cispo"}, {"clip_low": 1.0, "clip_high": 4.0}),
        ({"name": "sapo"}, {"args": {"temperature_positive": 1.0, "temperature_negative": 1.05}}),
        ({"name": "kl_cov"}, {"args": {"fraction": 2e-4, "kl_coef": 1.0}}),
        (
            {"name": "clip_cov", "args": {"high": 9.0}},
            {"args": {"dual_clip": None, "fraction": 2e-4, "low": 1.0, "high": 9.0}},
        ),
        ({"name": "decoupled_ppo"}, {"correction": {"name": "icepop", "args": {"low": 0.0, "cap": 5.0}}}),
        (
            {"name": "decoupled_ppo", "correction": {"args": {"cap": 4}}},
            {"correction": {"name": "icepop", "args": {"low": 0.0, "cap": 4}}},
        ),
        (
            {"name": "decoupled_ppo", "correction": "truncated"},
            {"correction": {"name": "truncated", "args": {"cap": 2.0}}},
        ),
        ({"correction": "icepop"}, {"correction": {"name": "icepop", "args": {"low": 0.5, "cap": 5.0}}}),
        ({"correction": "m2po"}, {"correction": {"name": "m2po", "args": {"cap": 0.04}}}),
        ({"advantage": "pass_k"}, {"advantage": {"name": "pass_k", "args": {"k": 4}}}),
        ({"denominator": 512}, {"denominator": 512}),
    ],
)
def test_keys_that_are_left_out_are_those_of_the_papers_of_what_is_chosen(given: Any, found: dict[str, Any]) -> None:
    settings = loss_of(**given)
    written = settings.model_dump()
    assert {key: written[key] for key in found} == found
    assert loss_of(**written) == settings


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["loss=cispo", "loss.dual_clip=3"],
            "loss.dual_clip: loss.name = cispo has no such key. It has: name, ",
        ),
        (["loss=sapo", "loss.clip_low=0.2"], "loss.clip_low: loss.name = sapo has no such key"),
        (["loss=my.py:own", "loss.clip_low=0.2"], "loss.clip_low: loss.name of your own has no such key"),
        (
            ["loss.correction={name: none, cap: 2}"],
            "loss.correction.cap: loss.correction.name = none has no such key",
        ),
        (["loss.correction.low=1"], "loss.correction.low: loss.correction.name = truncated has no such key"),
        (["loss.advantage={name: rloo, normalize_std: true}"], "loss.advantage.name = rloo has no such key. It has: n"),
        (["loss.advantage.args.k=2"], "loss.advantage.args.k: unknown key"),
        (["loss=clip_cov", "loss.args.lo=1"], "loss.args.lo: unknown key; did you mean 'low'?"),
        (["loss.kl.coefs=1"], "loss.kl.coefs: unknown key; did you mean 'coef'?"),
        (["loss=gpro"], "loss.name = gpro does not exist; did you mean 'grpo'? Built in: grpo, bnpo"),
        (["loss.correction=icepopp"], "loss.correction.name = icepopp does not exist; did you mean 'icepop'?"),
        (["loss.advantage=groups"], "loss.advantage.name = groups does not exist; did you mean 'group'?"),
        (["loss.name=ppo"], "loss.name = ppo does not exist; set task=ppo. Built in: grpo, bnpo"),
        (["loss=rloo"], "loss.name = rloo does not exist; set loss.advantage=rloo. Built in: "),
        (
            ["loss=trpo"],
            "loss.name = trpo does not exist; TRPO is not supported: set loss=grpo, whose clip bounds a step.",
        ),
        (["loss=reinforce"], "loss.name = reinforce does not exist; set loss.advantage=rloo. Built in: "),
        (["loss=dpo"], "loss.name = dpo does not exist; training on preference pairs is not supported. Built in: "),
        (["task=dapo"], "task.name = dapo does not exist; set loss=dapo. Built in: grpo, ppo"),
        (["loss.advantage=gae"], "loss.advantage.name = gae does not exist; set task=ppo. Built in: group, "),
        (["loss.advantage=grpo"], "loss.advantage.name = grpo does not exist; did you mean 'group'?"),
        (["loss.correction.name=trunc"], "Or name your own: module:NAME or path/to/file.py:NAME."),
        (["loss.correction={name: icepop, args: {low: 6}}"], "low = 6 must be less than cap = 5"),
        (["loss.correction.args.cap=0"], "loss.correction.args.cap = 0: must be greater than 0"),
        (["loss=clip_cov", "loss.args.low=5"], "low = 5 must be less than high = 5: nothing lies between them"),
        (["loss=clip_cov", "loss.args.low=x"], "loss.args.low = 'x': must be a number"),
        (["loss.denominator=token"], "loss.denominator = 'token': must be tokens, sequences, constant, or a number of"),
        (["loss.denominator=0"], "loss.denominator = 0: must be tokens, sequences, constant, or a number of tokens"),
        (
            ["loss.advantage={name: pass_k, args: {k: 99}}"],
            "loss.advantage.args.k = 99 must be at most rollout.group_size = 8",
        ),
        (["loss.kl={coef: 0.1, where: reward, estimator: unbiased}"], "Set loss.kl.estimator to k1, k2 or k3, or"),
        (
            ["loss=kl_cov", "loss.kl={coef: 0.1, where: reward}"],
            "loss.args.fraction would select wrong tokens. Set loss.kl.where",
        ),
        (
            ["loss=clip_cov", "loss.kl={coef: 0.1, where: reward}"],
            "loss.name = clip_cov compares advantages before an optimizer ste",
        ),
        (["loss.kl.refresh_steps=5"], "loss.kl.refresh_steps = 5 would have no effect: the run has no reference"),
        (["loss.kl.estimator=k1"], "loss.kl.estimator = k1 would have no effect: the run has no reference"),
        (["loss.kl.where=reward"], "loss.kl.where = reward would have no effect: the run has no reference"),
        (["loss.kl.reference=m2"], "loss.kl.reference = m2 would have no effect: the run has no reference"),
        (["loss.kl={coef: 0.1, mixup: 0.5}"], "loss.kl.mixup = 0.5 would have no effect: the reference is frozen"),
        (
            ["loss.kl={coef: 0.1, reference: m2, refresh_steps: 5}"],
            "would replace the reference loss.kl.reference = m2",
        ),
        (["loss={correction: m2po, proximal: interpolated}"], "Set loss.proximal=recomputed"),
        (["loss={proximal: engine}"], "with loss.proximal = engine the ratio already uses the engine's logprobs"),
        (["rollout.top_p=0.9"], "Set rollout.top_p=1, or loss.correction=none"),
    ],
)
def test_a_key_that_a_variant_does_not_have_and_a_contradiction_are_refused(overrides: list[str], words: str) -> None:
    assert words in refusal(*overrides)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("kl_coef", "kl.coef"),
        ("kl_estimator", "kl.estimator"),
        ("ref_refresh_steps", "kl.refresh_steps"),
        ("ref_mixup", "kl.mixup"),
        ("importance_correction", "correction"),
        ("normalize_std", "advantage.normalize_std"),
    ],
)
def test_a_key_that_moved_into_a_section_is_looked_for_there(before: str, now: str) -> None:
    shown = f"loss.{now}" if "." in now else now
    assert f"loss.{before}: loss.name = grpo has no such key; did you mean {shown!r}?" in refusal(f"loss.{before}=1")


def test_a_bare_name_on_the_command_line_chooses_and_keeps_what_every_loss_has() -> None:
    written = {"kl": {"coef": 0.1}, "correction": {"name": "icepop", "args": {"cap": 3.0}}}
    loss = load("loss=gspo", "loss.correction=none", "loss.advantage=rloo", loss=written).loss
    assert (loss.name, loss.kl.coef, loss.correction.name, loss.advantage.name) == ("gspo", 0.1, "none", "rloo")
    assert (
        load("loss.correction.args.cap=4", loss={"correction": "icepop"}).loss.correction
        == loss_of(correction={"name": "icepop", "args": {"cap": 4.0}}).correction
    )


def test_a_layer_adds_keys_to_a_variant_that_the_one_below_names(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(yaml.safe_dump({**LEAST, "loss": {"name": "dapo", "correction": "icepop"}}))
    (tmp_path / "above.yaml").write_text("base: below.yaml\nloss: {correction: {args: {cap: 3.0}}, kl: {coef: 0.1}}\n")
    loss = load_config(str(tmp_path / "above.yaml")).loss
    assert (loss.name, loss.correction) == (
        "dapo",
        loss_of(correction={"name": "icepop", "args": {"cap": 3.0}}).correction,
    )
    (tmp_path / "above.yaml").write_text("base: below.yaml\nloss: gspo\n")
    loss = load_config(str(tmp_path / "above.yaml")).loss
    assert (loss.name, loss.correction.name) == ("gspo", "icepop")


def test_functions_of_the_users_take_any_args() -> None:
    own = {"name": "mine.py:loss", "args": {"a": 1}, "advantage": {"name": "mine.py:advantage", "args": {"b": 2}}}
    loss = load(loss=own).loss
    assert loss.functions == {
        "loss.name": "mine.py:loss",
        "loss.advantage.name": "mine.py:advantage",
        "loss.correction.name": "truncated",
    }


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("section", FOREIGN)
def test_a_section_that_a_task_does_not_have_cannot_be_written(task: str, section: str) -> None:
    sections = {**TASKS[task], section: FOREIGN[section]}
    if task != "sft":
        load(**sections)
        return
    key = "kl.coef" if section == "loss" else next(iter(FOREIGN[section]))
    assert refusal(**sections).startswith(f"{section}.{key}: task = {task} has no such key. Remove it")
    assert refusal(f"{section}={{}}", **TASKS[task]).startswith(f"{section}: task = {task} has no such key")


@pytest.mark.parametrize(("task", "key"), [("grpo", "teacher"), ("ppo", "batch_size"), ("sft", "critic_lr")])
def test_a_key_of_another_task_is_an_error_with_the_keys_of_this_one(task: str, key: str) -> None:
    assert f"task.{key}: task.name = {task} has no such key" in refusal(f"task.{key}=1", task=task)


@pytest.mark.parametrize(
    ("task", "override"),
    [
        ("ppo", "loss.advantage=rloo"),
        ("ppo", "rollout.drop_zero_variance=true"),
        ("distill", "rollout.dynamic_sampling=2"),
        ("sft", "rollout.prompts_per_step=4"),
        ("sft", "rollout.mask_truncated=true"),
    ],
)
def test_a_key_that_a_task_does_not_have_cannot_be_written(task: str, override: str) -> None:
    key = override.partition("=")[0]
    assert refusal(override, **TASKS[task]).startswith(
        f"{key}: task = {task} has no such key. Remove it (on the command line: {key}=null), or set task to grpo"
    )


def test_null_takes_out_what_another_task_has_left() -> None:
    written = {"loss": {"name": "gspo"}, "rollout": {"group_size": 4, "max_new_tokens": 9}}
    config = load("task=sft", "loss=null", "rollout.group_size=null", **written)
    assert config.rollout.max_new_tokens == 9


@pytest.mark.parametrize("task", TASKS)
def test_the_resolved_config_of_a_task_has_its_keys_alone_and_loads_again(task: str, tmp_path: Path) -> None:
    config = load(**TASKS[task])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_resolved(tmp_path / "config.yaml") == config
    values = yaml.safe_load(to_yaml(config))
    assert values["task"]["name"] == task
    shown = {line.partition(" ")[0] for line in describe(config).splitlines()}
    assert ("loss.kl.coef" in shown) == ("kl" in values.get("loss", {})) == (task != "sft")
    assert ("loss.advantage.name" in shown) == (task in ("grpo", "distill"))
    assert ("rollout.group_size" in shown) == (task != "sft")


def test_the_models_of_a_run_are_those_that_its_parts_load() -> None:
    assert load().models == {"model.path": "m"}
    assert load("loss.kl.coef=0.1").models == {"model.path": "m"}
    other = load("loss.kl.coef=0.1", "loss.kl.reference=r", "task.args.teacher=t", task="distill")
    assert other.models == {"model.path": "m", "loss.kl.reference": "r", "task.args.teacher": "t"}
    assert other.scoring_models == {"loss.kl.reference": "r", "task.args.teacher": "t"}
    assert load("task.args.critic=c", task="ppo").models == {"model.path": "m", "task.args.critic": "c"}


def test_optimizer_steps_are_those_of_any_task() -> None:
    for task in TASKS.values():
        config = load("train.num_minibatches=4", "train.total_steps=100", **task)
        assert config.optimizer_steps(100) == 400
    message = refusal("train.num_minibatches=33", **TASKS["sft"])
    assert "train.num_minibatches = 33 exceeds task.args.batch_size = 32" in message


def test_another_loss_in_an_override_of_a_resolved_config_keeps_what_was_resolved() -> None:
    config = with_overrides(load_config("local/debug"), ["loss.name=dapo"])
    assert config.loss.name == "dapo"
    assert config.model_dump()["loss"]["clip_high"] == 0.2


def test_the_penalty_of_long_completions_must_fit_into_a_completion() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.overlong_tokens = 300 must be at most rollout\.max_new_tokens"):
        check_rules(minimal_config(rollout={"overlong_tokens": 300}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"environment": "guess.py:G", "rollout": {"overlong_tokens": 9}}, "overlong_tokens = 9 would have no effect"),
        ({"loss": {"advantage": "turns"}}, "loss.advantage = turns compares the turns of episodes"),
    ],
)
def test_what_has_no_effect_on_episodes_or_without_them_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_rules(minimal_config(**sections))
