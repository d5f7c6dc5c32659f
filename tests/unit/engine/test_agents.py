"""Agents that play by themselves, in real processes, on an engine whose completions a test writes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.episodes.workers import first_answer
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import Completion, Episode, GroupRequest
from tests.unit.engine.test_episodes import SAMPLING, WrittenEngine, make_config, only, play, scene, tokenizer

__all__ = ["tokenizer"]
FILE = Path(__file__).parents[1] / "episodes" / "agents.py"


def config_of(name: str = "Agent", lag: int = 0, **environment: Any) -> Any:
    return make_config(name, lag, FILE, **environment)


def played(tokenizer: Any, do: str, **environment: Any) -> Episode:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    return only(play(config_of(**environment), engine, GroupRequest(0, (), (7,), SAMPLING, **scene(do=do))))


def test_an_agent_is_given_an_address_and_its_episode_has_the_sampled_ids_and_its_reward(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    episode = only(play(config_of(), engine, GroupRequest(0, (), (7,), SAMPLING, **scene())))
    assert (episode.finish_reason, episode.failure) == ("stop", "")
    assert [turn.reward for turn in episode.turns] == [0.0, 6.0]
    assert [turn.starts_anew for turn in episode.turns] == [True, False]
    ids = [token for turn in episode.turns for token in (*turn.context_ids, *turn.token_ids)]
    [[_], [asked]] = engine.calls
    assert ids[: len(asked.prompt_token_ids)] == list(asked.prompt_token_ids)
    assert engine.calls[0][0].seeds == (7,)


def test_a_sites_proxy_is_not_asked_for_the_engines_address(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    assert played(tokenizer, "").failure == ""


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("raise", "KeyError: 'level'"),
        ("nonsense", "play must return a finite number or a hpc_grpo.Turn, not 'good'"),
        ("nothing", "without a completion"),
        ("quit", "SystemExit(4)"),
        ("hang", "neither ended nor asked the model within 1 s"),
        ("exit", "exit code 3"),
    ],
)
def test_what_an_agent_does_wrong_is_the_failure_of_its_episode_and_others_end_well(
    tokenizer: Any, do: str, told: str
) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    requests = [GroupRequest(number, (), (7,), SAMPLING, **scene(do=do * (number == 1))) for number in range(3)]
    groups = play(config_of(timeout_s=1.0), engine, *requests)
    episodes = [only([group]) for group in groups]
    assert told in episodes[1].failure
    if do != "exit":  # its process ends with all its sessions, each time
        assert [episode.failure for episode in (episodes[0], episodes[2])] == ["", ""]


def test_an_agent_that_blocks_the_event_loop_is_named_and_its_neighbours_are_not_blamed(tokenizer: Any) -> None:
    """The neighbours have asked earlier, so they would be late first."""
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    does = ("think", "block", "think")
    requests = [GroupRequest(number, (), (7,), SAMPLING, **scene(do=do)) for number, do in enumerate(does)]
    first, second, third = (
        only([own]) for own in play(config_of("AsyncAgent", lag=1, timeout_s=4.0), engine, *requests)
    )
    assert "within 4 s; it blocks the event loop at " in second.failure
    assert "agents.py:" in second.failure
    assert [(own.failure, own.turns[-1].reward) for own in (first, third)] == [("", 0.25)] * 2


def test_a_task_that_an_agent_leaves_and_that_blocks_the_event_loop_costs_its_neighbours_a_start(
    tokenizer: Any, tmp_path: Path
) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    requests = [
        GroupRequest(number, (), (7,), SAMPLING, **scene(do=do, left=str(tmp_path / "left")))
        for number, do in enumerate(("follow", "leave", "follow"))
    ]
    groups = play(config_of("AsyncAgent", lag=1, timeout_s=4.0), engine, *requests)
    assert [(only([own]).failure, only([own]).turns[-1].reward) for own in groups] == [("", 0.25)] * 3
    assert len(engine.calls) == 5, "both neighbours have begun again"


def test_agents_that_hang_beside_each_other_are_ended_together(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    requests = [GroupRequest(number, (), (7,), SAMPLING, **scene(do="hang")) for number in range(6)]
    groups = play(config_of(timeout_s=1.0), engine, *requests)
    assert all("neither ended nor asked" in only([group]).failure for group in groups)
    assert len(engine.calls) == 1, "none has begun again"


def test_agents_beside_three_that_hang_begin_again_and_end_well(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    requests = [GroupRequest(number, (), (7,), SAMPLING, **scene(do="hang" * (number < 3))) for number in range(5)]
    groups = play(config_of(timeout_s=1.0), engine, *requests)
    assert [bool(only([group]).failure) for group in groups] == [True, True, True, False, False]


@pytest.mark.parametrize("keys", [{"max_turns": 1}, {"max_tokens": 8}])
def test_what_an_agent_raises_behind_a_limit_is_a_truncation_without_reward(
    tokenizer: Any, keys: dict[str, int]
) -> None:
    episode = played(tokenizer, "", **keys)
    assert (len(episode.turns), episode.finish_reason, episode.failure) == (1, "length", "")
    assert episode.turns[0].reward == 0.0


def test_an_agent_that_asks_on_behind_its_limit_is_ended(tokenizer: Any) -> None:
    episode = played(tokenizer, "flood", max_turns=3, timeout_s=1.0)
    assert (len(episode.turns), episode.finish_reason, episode.failure) == (3, "length", "")


@pytest.mark.parametrize("lag", [0, 1])
def test_agents_that_are_killed_begin_again_with_their_seeds(tokenizer: Any, tmp_path: Path, lag: int) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    requests = [
        GroupRequest(number, (), (number, 8), SAMPLING, **scene(do="die once" * (number == 2), number=number))
        for number in range(4)
    ]
    groups = play(config_of(lag=lag, args={"marks": str(tmp_path)}), engine, *requests)
    assert [group.ordinal for group in groups] == [0, 1, 2, 3]
    assert [(len(own.turns), own.failure) for group in groups for own in group.episodes] == [(2, "")] * 8
    first = [asked.seeds[0] for call in engine.calls for asked in call if asked.ordinal == 2 and asked.seeds[0] < 9]
    if lag == 0:  # waves keep both in step, so both begin again
        assert sorted(first) == [2, 2, 8, 8]
    else:  # the one beside the killed may have ended
        assert set(first) == {2, 8}
        assert len(first) > 2


def test_a_stopped_process_is_lost_and_its_episode_masked_the_third_time(tokenizer: Any) -> None:
    assert "was stopped (SIGSTOP)" in played(tokenizer, "stop", timeout_s=0.5).failure


def test_a_synchronous_run_queues_the_turns_of_all_agents_at_once(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    requests = [GroupRequest(number, (), (1, 2), SAMPLING, **scene()) for number in range(20)]
    play(config_of(), engine, *requests)
    assert [len(call) for call in engine.calls] == [40, 40], "more agents wait than a pool has threads"
    assert [request.ordinal for request in engine.calls[1]] == [number for number in range(20) for _ in range(2)]


def test_async_agents_that_ask_in_threads_of_the_pool_are_asked_in_one_wave(tokenizer: Any) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    num_agents = (os.cpu_count() or 1) + 8
    requests = [GroupRequest(number, (), (1,), SAMPLING, **scene()) for number in range(num_agents)]
    groups = play(config_of("AsyncAgent", timeout_s=5.0), engine, *requests)
    assert [len(call) for call in engine.calls] == [num_agents]
    assert not any(only([group]).failure for group in groups)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_agent_may_ask_side_by_side(tokenizer: Any, lag: int) -> None:
    engine = WrittenEngine(tokenizer, lambda _: "yes")
    [group] = play(config_of(lag=lag), engine, GroupRequest(0, (), (7, 8), SAMPLING, **scene(do="side by side")))
    for episode in group.episodes:
        assert (len(episode.turns), episode.turns[-1].reward, episode.failure) == (5, 4.0, "")
        assert all(turn.starts_anew for turn in episode.turns)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_episode_ends_when_the_engine_samples_nothing_of_it_any_more(tokenizer: Any, lag: int) -> None:
    class SlowEngine(WrittenEngine):
        def _future(self, request: GroupRequest) -> Future[Completion]:
            written = super()._future(request)
            if "slow" not in tokenizer.decode(request.prompt_token_ids):
                return written
            slow.append(Future())
            slow[-1].set_running_or_notify_cancel()
            threading.Timer(2.0, lambda: slow[-1].set_result(written.result())).start()
            return slow[-1]

    slow: list[Future[Completion]] = []
    engine = SlowEngine(tokenizer, lambda _: "yes")
    [group] = play(config_of(lag=lag), engine, GroupRequest(0, (), (7,), SAMPLING, **scene(do="give up")))
    assert [own.done() for own in slow] == [True]
    assert (len(only([group]).turns), only([group]).failure) == (1, "")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize("config", [config_of(), make_config()], ids=["an agent", "an environment"])
def test_what_the_engine_raises_is_no_failure_of_who_plays(
    tokenizer: Any, config: Config, kind: type[Exception]
) -> None:
    def gone(_: GroupRequest) -> str:
        raise kind("the engine is gone")

    with pytest.raises(kind, match="the engine is gone"):
        play(config, WrittenEngine(tokenizer, gone), GroupRequest(0, (), (7,), SAMPLING, **scene()))


def test_an_agent_runs_under_its_own_python_with_its_own_packages(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    assert played(tokenizer, "modules", python=python).metrics == {"found": 0.0, "is_own": 1.0}
    config = config_of(python=f"{python}9")
    [(_, environment)] = config.environments.values()
    with pytest.raises(ConfigError, match=r"environment.python = .*python9 cannot be started: No such file"):
        first_answer("data.train", environment, {})
