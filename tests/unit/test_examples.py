"""The examples that users copy: each does what its page says, in fewer than thirty lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.episodes.builtin import environment_of
from hpc_grpo.metrics.evals import EvalGroup, eval_metrics
from hpc_grpo.registry import EVAL_METRICS
from hpc_grpo.types import GroupRequest, SamplingSpec
from tests.support.command import call
from tests.support.configs import minimal_config
from tests.support.sequences import graded
from tests.support.streams import loaded
from tests.unit.engine.test_endpoint import TEMPLATE
from tests.unit.engine.test_episodes import WrittenEngine, make_config, only, play, scene

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = (
    "data_source",
    "guess_the_number",
    "hard_prompts_advantage",
    "majority_vote",
    "proximal_pull_loss",
    "short_answer",
)


@pytest.mark.parametrize("name", SHORT)
def test_an_example_has_fewer_than_thirty_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 30


@pytest.mark.parametrize(("second", "told", "reward"), [("2", "<tool>5", 1.0), ('"2"', "<tool>Error: TypeError", 0.0)])
def test_the_model_adds_by_the_tool(make_tokenizer: Callable[..., Any], second: str, told: str, reward: float) -> None:
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": 3, "b": {second}}}}}</tool_call>'
    answers = iter([call, "It is 5." if reward else "?"])
    engine = WrittenEngine(make_tokenizer(TEMPLATE), lambda _: next(answers))
    row = {"messages": [{"role": "user", "content": "3 + 2 = ?"}], "answer": "5"}
    request = GroupRequest(0, (), (7,), SamplingSpec(max_new_tokens=200), **scene(**row))
    episode = only(play(make_config("AddingAgent", file=EXAMPLES / "adding_agent.py"), engine, request))
    assert ([turn.reward for turn in episode.turns], episode.failure) == ([0.0, reward], "")
    assert told in engine.tokenizer.decode(engine.calls[1][0].prompt_token_ids)


def test_the_example_of_a_data_source_gives_the_same_items_each_time(
    make_tokenizer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = {"path": f"{EXAMPLES}/data_source.py:products", "args": {"num_items": 20, "largest": 5}}
    streams = loaded(minimal_config(data={"train": train, "template": "plain"}), make_tokenizer())
    prompts = [streams.train.prompt(ordinal) for ordinal in range(20)]
    for prompt in prompts:
        left, right = prompt.text.removeprefix("What is ").removesuffix("?").split(" * ")
        assert prompt.fields["answer"] == str(int(left) * int(right))
    again = loaded(minimal_config(data={"train": train, "template": "plain"}), make_tokenizer())
    assert [again.train.prompt(ordinal) for ordinal in range(20)] == prompts


def test_halving_finds_each_number_in_three_guesses_or_four() -> None:
    num_guesses = set()
    for seed in range(40):
        game = environment_of(f"{EXAMPLES}/guess_the_number.py:GuessTheNumber", {"highest": 8})
        first = game.reset({}, seed)
        assert "from 1 to 8" in str(first)
        assert game.step("Is it five?").metrics == {"unreadable": 1}
        low, high, number = 1, 8, 0
        while True:
            guess, number = (low + high) // 2, number + 1
            turn = game.step(f"[{guess}]")
            if turn.done:
                break
            low, high = (guess + 1, high) if turn.observation == "Higher." else (low, guess - 1)
        assert turn.reward == 1.0
        num_guesses.add(number)
    assert num_guesses == {1, 2, 3, 4}


@pytest.mark.parametrize(("args", "difficulty"), [({}, 0.75), ({"power": 2}, 0.5625)])
def test_an_advantage_outside_the_package_is_asked_with_its_own_settings(args: Any, difficulty: float) -> None:
    config = minimal_config(
        loss={"advantage": {"name": f"{EXAMPLES}/hard_prompts_advantage.py:hard_prompts", "args": args}}
    )
    grades = graded(1.0, 0.0, 0.0, 0.0, 9.0, valid=(True, True, True, True, False))
    (advantages,) = algorithm_of(config).step_advantages([grades])
    assert advantages == pytest.approx([0.75 * difficulty, *[-0.25 * difficulty] * 3, 0.0])


def test_the_example_of_a_tool_answers_the_model_and_says_what_it_does_not_know() -> None:
    environment: Any = environment_of("tools", {"tools": [f"{EXAMPLES}/lookup_tool.py:population"]})
    [schema] = environment.tools
    assert schema["function"]["description"] == "Return how many people live in a city."
    assert schema["function"]["parameters"]["properties"]["city"]["description"] == "The name of the city, in English."
    calls = [json.dumps({"name": "population", "arguments": {"city": city}}) for city in ("Oslo", "Rome")]
    turn = asyncio.run(environment.step("".join(f"<tool_call>{call}</tool_call>" for call in calls)))
    oslo, rome = (message["content"] for message in turn.observation)
    assert oslo == "717710"
    assert rome == "Error: no such city; there are Oslo, Quito, Perth"


def group(answer: str, *given: str) -> EvalGroup:
    solved = tuple(text == answer for text in given)
    rewards = tuple(map(float, solved))
    texts = tuple(f"It is \\boxed{{{text}}}." for text in given)
    return EvalGroup("What is 6*7?", "products", {"answer": answer}, texts, rewards, solved, (5,) * len(given))


def test_the_example_of_an_eval_metric_counts_what_most_completions_say() -> None:
    groups = [
        group("42", "42", "41", "42", "40"),  # most say the right answer
        group("42", "41", "42", "41", "40"),  # most say a wrong one
        group("42", "42", "41", "40", "39"),  # as often as any other, and first
    ]
    name = f"{EXAMPLES}/majority_vote.py:majority_vote"
    config = minimal_config(eval={"num_samples": 4, "metrics": [name]})
    metrics = eval_metrics(groups, config.eval, {name: EVAL_METRICS.find(name)})
    assert metrics["majority@4"] == 2 / 3
    assert metrics["pass@1"] == 4 / 12


def test_a_loss_outside_the_package_is_trained_on_with_its_own_settings_and_a_built_in_correction() -> None:
    loss = {
        "name": f"{EXAMPLES}/proximal_pull_loss.py:proximal_pull",
        "args": {"strength": 0.5},
        "correction": {"args": {"cap": 1.5}},
    }
    config = minimal_config(loss=loss)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    proximal, advantages = torch.tensor([[-1.5, -1.0], [2.0, -1.0]], dtype=torch.float64)
    engine = proximal - 1.0
    inputs = LossInputs(logprobs, proximal, engine, None, advantages, torch.zeros(2, dtype=torch.int64))
    output = algorithm_of(config).objective().loss(inputs)
    gradient = torch.autograd.grad(output.per_token.sum(), logprobs)[0]
    # Weights of e are cut at 1.5; the gradient of a token is w * (strength * log ratio - A).
    assert gradient.tolist() == pytest.approx([1.5 * (0.5 * 0.5 - 2.0), 1.5 * (0.5 * -1.0 + 1.0)])
    assert output.means["policy/pull"].tolist() == pytest.approx([0.25 * 0.25, 0.25 * 1.0])
    assert output.means["correction/weight_mean"].tolist() == [1.5, 1.5]


REWARD = f"{EXAMPLES}/short_answer.py:short_answer"
WORDS = ("reward", "test", REWARD, "--prompt", "6*7?", "--answer", "42", "--arg", "free_words=2")


def test_a_reward_outside_the_package_prefers_short_right_answers() -> None:
    completions = ("--completion", "42", "--completion", "It is 6*7, so 42", "--completion", "41")
    done = call(*WORDS, *completions)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "0.4", "0"]
    assert "answers of up to 2 words are worth most" in done.stderr


def test_the_example_of_a_reward_refuses_before_training_what_could_not_work() -> None:
    done = call(*WORDS[:-1], "free_words=0", "--completion", "42")
    assert done.exit_code == 78
    assert "free_words is 0" in done.stderr
