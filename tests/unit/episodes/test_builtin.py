"""The built-in environments of textarena and reasoning-gym, in a process as an engine has them."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from hpc_grpo.config import SourceConfig
from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.data.reasoning_gym import ReasoningGym
from hpc_grpo.episodes.builtin import environment_of
from hpc_grpo.episodes.builtin.games import OFFLINE_GAMES
from hpc_grpo.episodes.workers import EnvironmentFailedError, EnvironmentWorkers
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.inputs import refusals
from hpc_grpo.run.source import functions_of
from tests.support.configs import minimal_config
from tests.support.isolation import needs_isolation

GAMES = {  # and a move that each of them takes
    "2048-v0": "[up]",
    "Blackjack-v0": "[hit]",
    "FrozenLake-v0-random": "[down]",
    "GuessTheNumber-v0": "[{}]",
    "Mastermind-v0": "[1 2 3 {}]",
    "Minesweeper-v0": "[{} 3]",
    "Sokoban-v0": "[up]",
    "TowerOfHanoi-v0": "[A C]",
}


def play(name, *sessions, **keys):
    """Play sessions, each (row, seed, messages), by turns in one process; return their answers."""

    async def played():
        workers = EnvironmentWorkers(EnvironmentConfig(name=name, num_workers=1, **keys))
        try:
            begun = [await workers.reset(row, seed) for row, seed, _ in sessions]
            answers = [[first] for _, first in begun]
            for turn in range(max(len(messages) for _, _, messages in sessions)):
                for (session, _), own, (_, _, messages) in zip(begun, answers, sessions, strict=True):
                    if turn < len(messages) and not own[-1].done:
                        own.append(await session.step(messages[turn]))
            return answers
        finally:
            workers.close()

    return asyncio.run(played())


@pytest.mark.parametrize("game", GAMES)
def test_a_game_is_the_same_for_the_same_seed_whatever_else_its_process_plays(game, monkeypatch):
    moves = [GAMES[game].format(number) for number in (4, 5, 6, 1)]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    [alone] = play(f"textarena:{game}", ({}, 3, moves))
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    first, other, again = play(f"textarena:{game}", ({}, 3, moves), ({}, 2, moves[::-1]), ({}, 3, moves))
    assert alone == first == again
    assert len(alone) > 1
    assert all(answer.done or answer.messages[0]["content"] for answer in alone)
    if game != "TowerOfHanoi-v0":  # always begins alike
        assert other != first


def test_a_game_tells_what_is_new_and_gives_its_reward_at_the_end():
    hits = [f"I take [{number}]." for number in range(1, 9)]
    [answers] = play("textarena:GuessTheNumber-v0", ({}, 0, hits), args={"max_number": 8})
    first, *turns, last = answers
    assert "between 1 and 8" in first.messages[0]["content"]
    assert {answer.messages[0]["content"] for answer in turns} == {"The target number is higher."}
    assert (last.done, last.reward, last.messages, last.metrics) == (True, 1.0, [], {"invalid_moves": 0.0})


def test_a_game_ends_by_wrong_moves_and_takes_any_message():
    draw = random.Random(0)
    junk = [
        "",
        "x" * 100_000,
        "[" + "9" * 5000 + "]",
        "[²]",
        "\0",
        "[[",
        *("".join(map(chr, draw.sample(range(1, 5000), 50)))),
    ]
    for game in ("GuessTheNumber-v0", "Cryptarithm-v0", "FrozenLake-v0"):
        environment = environment_of(f"textarena:{game}", {})
        for message in junk:
            environment.reset({}, 1)
            turns = [environment.step(message), environment.step(message)]
            assert turns[-1].done
            assert turns[-1].reward <= 0.0
            assert turns[-1].metrics == {"invalid_moves": 1.0}


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("textarena:GuesTheNumber-v0", {}, "did you mean 'GuessTheNumber-v0'"),
        ("textarena:Nope", {}, "no game 'Nope'. Games of one player that need no network: 2048-v0, Blackjack-v0, "),
        ("textarena:GuessTheNumber-v0", {"highest": 3}, "unexpected keyword argument 'highest'"),
        ("textarena:KuhnPoker-v0", {}, "number of players has to be 2"),
        ("textarena:QuantumTicTacToe-v0", {}, "is not for one player"),
        ("textarena:Wordle-v0", {}, "Resource 'words' not found"),
        ("textarena", {}, "missing a required argument: 'game'"),
        ("reasoning_gym:chain_sum", {"tries": 0}, "tries is 0"),
        ("reasoning_gym:chain_sum", {"time": 3}, "did you mean 'time_s'"),
        ("tools", {"seconds": 3}, "Its args are: tools"),
        ("tool", {}, "did you mean 'tools'"),
        ("nowhere:Game", {}, "there is no nowhere.py in "),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_what_is_valid(name, args, told):
    with pytest.raises(ConfigError, match=told):
        environment_of(name, args)


def test_the_error_names_games_that_are_played_here():
    assert {name.partition("-")[0] for name in GAMES} == {*OFFLINE_GAMES.split()}


@pytest.mark.parametrize(
    ("package", "name"), [("textarena", "textarena:Sokoban-v0"), ("reasoning_gym", "reasoning_gym:chain_sum")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(package, name, monkeypatch):
    monkeypatch.setattr("hpc_grpo.episodes.builtin.games.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is missing. Install hpc-grpo\[(episodes|tasks)\]"):
        environment_of(name, {})


@pytest.fixture(scope="module")
def sum_row():
    [item] = ReasoningGym(SourceConfig(path="reasoning_gym:chain_sum", args={"size": 1})).items()
    return json.loads(json.dumps(item))


@needs_isolation
def test_an_answer_of_reasoning_gym_has_several_tries_and_the_last_one_counts(sum_row):
    right = rf"It is \boxed{{{sum_row['answer']}}}."
    args = {"tries": 3, "discount": 0.5}
    at_once, later, never = play(
        "reasoning_gym:chain_sum",
        (sum_row, 0, [right]),
        (sum_row, 0, ["no idea", right]),
        (sum_row, 0, ["1", "", r"\boxed{__import__('os')}"]),
        args=args,
    )
    assert [len(answers) - 1 for answers in (at_once, later, never)] == [1, 2, 3]
    assert at_once[0].messages == []  # the row's question is the prompt
    assert later[1].messages == [{"role": "user", "content": "That is not right. Try again."}]
    assert [answers[-1].done for answers in (at_once, later, never)] == [True] * 3
    assert [answers[-1].reward for answers in (at_once, later, never)] == [1.0, 0.5, pytest.approx(0.0, abs=0.01)]
    assert sum(answer.metrics.get("tries", 0.0) for answer in later) == 2.0


def test_rows_of_another_task_are_refused(sum_row):
    with pytest.raises(EnvironmentFailedError, match=r"this row has the task 'chain_sum'"):
        play("reasoning_gym:leg_counting", (sum_row, 0, ["1"]))
    with pytest.raises(EnvironmentFailedError, match=r"this row has the task None"):
        play("reasoning_gym:leg_counting", ({"question": "6*7?"}, 0, ["1"]))


def test_a_run_knows_the_files_of_its_environments_and_tools():
    mine = {"name": "tools", "args": {"tools": ["python", "my_tools.py:lookup"]}}
    config = minimal_config(environment=mine, rewards=[])
    assert functions_of(config) == {
        key: "my_tools.py:lookup" for key in functions_of(config) if key.endswith("environment.args.tools.1")
    }
    assert "data.train.environment.args.tools.1" in functions_of(config)
    own = minimal_config(environment={"name": "guess.py:Game"}, rewards=[])
    assert functions_of(own)["data.train.environment.name"] == "guess.py:Game"
    assert functions_of(minimal_config(environment={"name": "textarena:Sokoban-v0"}, rewards=[])) == {}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"name": "textarena:Soko-v0"}, "textarena has no game 'Soko-v0'"),
        ({"name": "tools", "args": {"tools": ["python"]}, "timeout_s": 5}, "a step of tools may take 20 s"),
    ],
)
def test_a_login_node_refuses_a_built_in_that_cannot_be_made(environment, told):
    config = minimal_config(environment=environment, rewards=[])
    assert any(told in str(error) for error in refusals([config], only="inputs"))


@needs_isolation
def test_tools_work_in_an_environments_process_with_its_limits():
    call = '<tool_call>{"name": "python", "arguments": {"code": "x = 6 * 7\\nx"}}</tool_call>'
    [[first, answer, last]] = play("tools", ({}, 0, [call, "It is 42."]), args={"tools": ["python", "calculator"]})
    assert first.messages == []
    assert [tool["function"]["name"] for tool in first.tools] == ["python", "calculator"]
    assert answer.messages == [{"role": "tool", "name": "python", "content": "42\n"}]
    assert (last.done, last.reward) == (True, 0.0)
