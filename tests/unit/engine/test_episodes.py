"""Episodes played with real processes of environments, on an engine whose completions a test writes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.config import Config
from hpc_grpo.engine.episodes import EpisodePlayer
from hpc_grpo.errors import PromptError
from hpc_grpo.types import Completion, Episode, GroupRequest, GroupSamples, SamplingSpec
from tests.support.configs import minimal_config

FILE = Path(__file__).parents[1] / "episodes" / "playing.py"
SAMPLING = SamplingSpec(max_new_tokens=40)


class WrittenEngine:
    """Samples what `write(request)` returns, an end token behind it; keeps what was asked in one go."""

    def __init__(self, tokenizer: Any, write: Callable[[GroupRequest], str]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.calls: list[list[GroupRequest]] = []

    async def sample(self, requests: Sequence[GroupRequest]) -> list[Future[Completion]]:
        self.calls.append(list(requests))
        return [self._future(request) for request in requests]

    def _future(self, request: GroupRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        if not request.prompt_token_ids:
            future.set_exception(PromptError("An engine refuses the prompt"))
            return future
        ids = [*self.tokenizer(self.write(request))["input_ids"], self.tokenizer.eos_token_id]
        is_cut = len(ids) > request.sampling.max_new_tokens
        ids = ids[: request.sampling.max_new_tokens]
        logprobs, versions = np.full(len(ids), -1.0, dtype=np.float32), np.zeros(len(ids), dtype=np.int32)
        future.set_result(Completion(np.array(ids, np.int32), logprobs, versions, "length" if is_cut else "stop"))
        return future


def make_config(name: str = "Bad", lag: int = 0, file: Path = FILE, **environment: Any) -> Config:
    return minimal_config(
        environment={"name": f"{file}:{name}", "num_workers": 1, **environment},
        data={"train": {"path": "a.jsonl", "prompt_field": None, "answer_field": None}, "template": "chat"},
        rollout={"max_policy_lag": lag},
    )


def scene(**row: Any) -> dict[str, Any]:
    """The fields of a request to the first environment."""
    return {"environment": 0, "row": row, "environment_seed": 1}


def play(config: Config, engine: WrittenEngine, *requests: GroupRequest) -> list[GroupSamples]:
    async def played() -> list[GroupSamples]:
        player = EpisodePlayer(config, engine.tokenizer, engine.sample)
        try:
            return [await task for task in player.start(requests)]
        finally:
            player.end_all()

    return asyncio.run(asyncio.wait_for(played(), 60.0))


def only(samples: Sequence[GroupSamples]) -> Episode:
    [episode] = [episode for group in samples for episode in group.episodes]
    return episode


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any], chat_template: str) -> Any:
    """Its template closes an answer as the model does, with the end token."""
    closing = "{{ m['content'] + ('<eos>' if m['role'] == 'assistant' else '') }}"
    return make_tokenizer(chat_template.replace("{{ m['content'] }}", closing))


def test_an_answer_without_an_environment_is_an_episode_of_one_turn(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda request: f"seed {request.seeds[0]}")
    group = GroupRequest(3, (5, 6), (7, 8), SAMPLING)
    [samples] = play(minimal_config(), engine, group)
    assert [request.seeds[0] for request in engine.calls[0]] == [7, 8]
    assert samples.ordinal == 3
    first, second = samples.episodes
    assert first.turns[0].context_ids is second.turns[0].context_ids, "the prompt is stored once"
    for episode in samples.episodes:
        [turn] = episode.turns
        assert (turn.context_ids.tolist(), turn.starts_anew, episode.finish_reason) == ([5, 6], True, "stop")


def test_each_turn_goes_on_from_the_ids_that_were_given_and_sampled(tokenizer: Any) -> None:
    answers = iter(["one", "two", "raise"])
    engine = WrittenEngine(tokenizer, lambda _: next(answers))
    episode = only(play(make_config(), engine, GroupRequest(0, (), (7,), SAMPLING, **scene())))
    prompts = [list(request.prompt_token_ids) for [request] in engine.calls]
    assert tokenizer.decode(prompts[0]) == "<user>go\n<assistant>"
    assert tokenizer.decode(prompts[1]) == "<user>go\n<assistant>one<eos>\n<user>did one\n<assistant>"
    sequence: list[int] = []
    for prompt, turn in zip(prompts, episode.turns, strict=False):
        sequence += turn.context_ids.tolist()
        assert sequence == prompt
        sequence += turn.token_ids.tolist()
    assert [turn.reward for turn in episode.turns] == [0.5, 0.5]
    assert [turn.starts_anew for turn in episode.turns] == [True, False]
    assert "KeyError: 'level'" in episode.failure


def test_every_turn_has_a_seed_of_its_own_and_the_first_that_of_the_request(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "go")
    play(make_config(max_turns=3), engine, GroupRequest(0, (), (7, 8), SAMPLING, **scene()))
    seeds = [request.seeds[0] for call in engine.calls for request in call]
    assert seeds[:2] == [7, 8]
    assert len(set(seeds)) == 6


@pytest.mark.parametrize(
    ("keys", "num_turns", "finish_reason"),
    [({"max_turns": 2}, 2, "length"), ({"max_tokens": 61}, 3, "length"), ({"max_tokens": 3}, 1, "length")],
)
def test_an_episode_ends_at_its_limit_of_turns_or_tokens(
    tokenizer: Any, keys: dict[str, int], num_turns: int, finish_reason: str
) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "one")
    episode = only(play(make_config(**keys), engine, GroupRequest(0, (), (7,), SAMPLING, **scene())))
    assert (len(episode.turns), episode.finish_reason, episode.failure) == (num_turns, finish_reason, "")
    tokens = sum(len(turn.context_ids) + len(turn.token_ids) for turn in episode.turns)
    assert tokens - len(episode.turns[0].context_ids) <= keys.get("max_tokens", tokens)


def test_done_ends_an_episode_well_with_the_metrics_of_all_turns(tokenizer: Any) -> None:
    numbers = iter("12345678")
    engine = WrittenEngine(tokenizer, lambda _: next(numbers))
    request = GroupRequest(0, (), (7,), SAMPLING, **scene(what="a number"))
    episode = only(play(make_config("Guess"), engine, request))
    assert (episode.finish_reason, episode.turns[-1].reward) == ("stop", 1.0)
    assert episode.metrics["guesses"] == len(episode.turns)
    assert episode.metrics["env_s"] > 0.0


def test_a_synchronous_run_queues_a_turn_of_all_episodes_at_once_in_their_order(tokenizer: Any) -> None:
    config = make_config(max_turns=3)
    groups = [GroupRequest(ordinal, (), (1, 2), SAMPLING, **scene(first=f"go {ordinal}")) for ordinal in range(3)]
    engine = WrittenEngine(tokenizer, lambda request: "raise" if request.ordinal == 1 else "on")
    play(config, engine, *groups)
    assert [[request.ordinal for request in call] for call in engine.calls] == [
        [0, 0, 1, 1, 2, 2],
        [0, 0, 2, 2],
        [0, 0, 2, 2],
    ]


def test_with_a_lag_plain_prompts_are_queued_at_once_and_each_episode_goes_on_by_itself(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "on")
    plain = [GroupRequest(ordinal, (5,), (1, 2), SAMPLING) for ordinal in (1, 2)]
    play(make_config(lag=1, max_turns=2), engine, GroupRequest(0, (), (3,), SAMPLING, **scene()), *plain)
    assert sorted(len(call) for call in engine.calls) == [1, 1, 4]


def test_an_episode_whose_process_is_lost_begins_again_and_fails_the_third_time(tokenizer: Any) -> None:
    answers = iter(["one", "exit", "one", "two", "three"])
    engine = WrittenEngine(tokenizer, lambda _: next(answers))
    request = GroupRequest(0, (), (7,), SAMPLING, **scene())
    episode = only(play(make_config(max_turns=3), engine, request))
    assert (len(episode.turns), episode.failure) == (3, "")
    seeds = [asked.seeds[0] for [asked] in engine.calls]
    assert seeds[:2] == seeds[2:4]
    episode = only(play(make_config(), WrittenEngine(tokenizer, lambda _: "exit"), request))
    assert episode.turns == ()
    assert "exit code 3" in episode.failure
    assert "3 times" in episode.failure


def test_an_episode_that_ends_its_process_each_time_masks_itself_alone(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda request: "exit" if request.ordinal == 1 else "on")
    groups = [GroupRequest(ordinal, (), (1, 2), SAMPLING, **scene()) for ordinal in range(4)]
    played = play(make_config(max_turns=2), engine, *groups)
    failed = [[bool(episode.failure) for episode in group.episodes] for group in played]
    assert failed == [[False, False], [True, True], [False, False], [False, False]]


def test_an_episode_that_is_cut_in_its_last_answer_counts_as_truncated(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda request: "1")
    request = GroupRequest(0, (), (7,), SamplingSpec(max_new_tokens=1), **scene(what="a number"))
    episode = only(play(make_config("Guess", args={"highest": 1}), engine, request))
    assert (episode.turns[0].reward, episode.finish_reason) == (1.0, "length")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"raises": True}, "no such level"),
        ({"first": "x" * 600}, "more than data.max_prompt_tokens"),
        ({"first": [{"role": "tool", "content": "x"}]}, "no tools here"),
        ({"first": {"role": "user"}}, "content of a message is text"),
        ({"first": {"role": "assistant", "content": "", "tool_calls": ["ls"]}}, "tool_calls of a message"),
    ],
)
def test_a_beginning_that_cannot_be_shown_is_a_failure_of_its_episode(
    tokenizer: Any, row: dict[str, Any], told: str
) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "on")
    well = GroupRequest(1, (), (7,), SAMPLING, **scene())
    first, second = play(make_config(max_turns=1), engine, GroupRequest(0, (), (7,), SAMPLING, **scene(**row)), well)
    assert told in only([first]).failure
    assert only([second]).failure == ""


def test_a_prompt_that_the_engine_refuses_ends_its_own_group_alone(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "on")

    async def played() -> Any:
        player = EpisodePlayer(minimal_config(), tokenizer, engine.sample)
        tasks = player.start([GroupRequest(0, (), (1, 2), SAMPLING), GroupRequest(1, (4,), (1,), SAMPLING)])
        return await asyncio.gather(*tasks, return_exceptions=True)

    refused, taken = asyncio.run(played())
    assert isinstance(refused, PromptError)
    assert len(taken.episodes) == 1


def test_another_engine_plays_the_episodes_of_a_lost_one_again_with_the_same_ids(tokenizer: Any) -> None:
    class DyingEngine(WrittenEngine):
        async def sample(self, requests: Sequence[GroupRequest]) -> list[Future[Completion]]:
            sampled = await super().sample(requests)
            if len(self.calls) < 2:
                return sampled
            raise RuntimeError("killed in a turn")

    def write(request: GroupRequest) -> str:
        return str(zlib.crc32(repr((list(request.prompt_token_ids), request.seeds[0])).encode()) % 9 + 1)

    config = make_config("Guess", max_turns=4)
    requests = [GroupRequest(number, (), (7, 8), SAMPLING, **scene(what=f"number {number}")) for number in range(3)]
    whole, dying, other = (kind(tokenizer, write) for kind in (WrittenEngine, DyingEngine, WrittenEngine))
    expected = play(config, whole, *requests)
    with pytest.raises(RuntimeError, match="killed in a turn"):
        play(config, dying, *requests)
    again = play(config, other, *requests)
    assert other.calls == whole.calls, "turn for turn the same prompts and seeds, in the same batches"
    for one, two in zip(expected, again, strict=True):
        assert [own.finish_reason for own in one.episodes] == [own.finish_reason for own in two.episodes]
        for first, second in zip(one.episodes, two.episodes, strict=True):
            pairs = list(zip(first.turns, second.turns, strict=True))
            assert all(np.array_equal(a.context_ids, b.context_ids) and a.reward == b.reward for a, b in pairs)
            assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)


def test_episodes_of_a_driver_that_is_gone_end_with_their_processes(tokenizer: Any) -> None:
    async def played() -> Any:
        asked = asyncio.Event()
        in_engine: list[Future[Completion]] = []
        num_calls = 0

        async def never(requests: Sequence[GroupRequest]) -> list[Future[Completion]]:
            nonlocal num_calls
            num_calls += 1
            asked.set()
            in_engine.extend(futures := [Future[Completion]() for _ in requests])
            return futures

        player = EpisodePlayer(make_config(), tokenizer, never)
        tasks = player.start([GroupRequest(number, (), (7, 8), SAMPLING, **scene()) for number in range(2)])
        await asked.wait()
        player.end_all()
        for completion in in_engine:
            completion.set_exception(RuntimeError("the driver that asked for it is gone"))
        outcome, *_ = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert num_calls == 1, "nothing is asked for a driver that is gone"
        processes = [process.end for stage in player._stages for process in stage.workers._processes]
        return outcome, processes

    outcome, processes = asyncio.run(played())
    assert isinstance(outcome, asyncio.CancelledError)
    assert processes == ["was ended with its engine"]
