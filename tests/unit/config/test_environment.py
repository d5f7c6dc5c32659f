"""The section `environment`: what it changes in other sections, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config.describe import describe
from hpc_grpo.config.load import overridden
from hpc_grpo.config.rules import check_rules
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

PLAYED = {"name": "game.py:Game", "max_tokens": 900}


def test_an_environment_needs_no_rewards_and_decides_the_longest_sequence() -> None:
    config = minimal_config(environment="game.py:Game")
    played = minimal_config(environment=PLAYED)
    assert (config.environment.name, config.environment.max_turns) == ("game.py:Game", 8)
    assert played.max_model_len == played.data.max_prompt_tokens + 900
    assert list(played.environments) == ["data.train"]


def test_a_source_of_a_mix_has_an_environment_of_its_own_and_the_rewards_of_the_run() -> None:
    mix = [{"path": "a"}, {"path": "b", "environment": PLAYED}, {"path": "c", "environment": PLAYED, "rewards": []}]
    config = minimal_config(data={"train": {"mix": mix}})
    assert [
        [reward.name for reward in config.rewards_of(source)] for _, source in config.data.sources(for_eval=False)
    ] == [
        ["correctness"],
        ["correctness"],
        [],
    ]
    assert [source.path for source, _ in config.environments.values()] == ["b", "c"]
    check_rules(config)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"environment": {"name": "tools", "args": {"tools": ["calculator"]}}, "rewards": []},
            "tools, which gives no reward",
        ),
        ({"data": {"train": {"path": "a", "prompt_field": None}}}, "is for sources with an environment"),
        ({"environment": {"name": "tols"}}, "did you mean 'tools'?"),
        (
            {"data": {"train": {"path": "a", "environment": PLAYED}, "eval": {"path": "e"}}, "rewards": []},
            "data.eval has no environment",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        check_rules(minimal_config(**sections))


def test_an_environment_by_its_bare_name_takes_further_keys() -> None:
    values = overridden({}, ["environment=game.py:Game", "environment.max_tokens=64"])
    assert values == {"environment": {"name": "game.py:Game", "max_tokens": 64}}


def test_an_unknown_key_to_describe_has_the_suggestion_of_an_unknown_override() -> None:
    with pytest.raises(ConfigError, match=r"no key 'lr'; did you mean 'train\.lr'\?"):
        describe(minimal_config(), ["lr"])
    with pytest.raises(ConfigError, match=r"no key 'lora\.r'; did you mean 'lora'\?"):  # a section that is not set
        describe(minimal_config(), ["lora.r"])


def test_a_config_with_an_environment_is_described() -> None:
    assert "environment.name = game.py:Game" in describe(minimal_config(environment=PLAYED, rewards=[]))
