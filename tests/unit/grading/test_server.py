"""The reward server, and `remote` that asks it and servers like it, on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.errors import ConfigError, RewardError
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.grading.server import RewardServer
from hpc_grpo.rewards.builtin.remote import remote
from hpc_grpo.rewards.http import AnswerError
from tests.support.command import call
from tests.support.stand_in_server import Reply, Serve

TOKEN = "t0ken-1b7"
KEY = "REWARD_TEST_KEY"


@pytest.fixture
def reward_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(KEY, TOKEN)
    own = tmp_path / "own.py"
    own.write_text(
        "def share(prompts, completions, level, **fields):\n"
        "    assert 'bad' not in completions, 'odd'\n"
        "    return [len(text) / each for text, each in zip(completions, level)]\n"
    )
    pool = RewardPool([RewardConfig(name=f"{own}:share")], num_workers=1)
    with RewardServer(("127.0.0.1", 0), pool, TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
    pool.close()


def ask(*completions: str, **arguments: Any) -> list[float]:
    return asyncio.run(remote(["p"] * len(completions), list(completions), **arguments))


def test_the_reward_server_scores_what_remote_asks(reward_server: str) -> None:
    assert ask("ab", "abcd", url=reward_server, api_key_env=KEY, level=[2, 2]) == [1.0, 2.0]
    assert ask("ab", "abcd", url=reward_server, api_key_env=KEY, level=[2, 4]) == [1.0, 1.0]


def test_a_reward_that_fails_on_the_server_is_a_failure_here_and_no_zero(reward_server: str) -> None:
    with pytest.raises(AnswerError, match=r"422: .*AssertionError: odd"):
        ask("bad", url=reward_server, api_key_env=KEY, level=[1])
    assert ask("ok", url=reward_server, api_key_env=KEY, level=[1]) == [2.0]


@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_reward_server_serves_nobody_without_its_token(reward_server: str, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for method, path in (("POST", "/score"), ("GET", "/health"), ("GET", "/nothing")):
        response = httpx.request(method, reward_server + path, json={}, headers=headers)
        assert (response.status_code, list(response.json())) == (401, ["error"])


@pytest.mark.parametrize(
    "body",
    [[], {}, {"prompts": ["p"]}, {"prompts": ["p"], "completions": [1]}, {"prompts": [], "completions": ["c"]},
     {"prompts": ["p"], "completions": ["c"], "fields": {"level": [1, 2]}}],
)  # fmt: skip
def test_what_is_no_group_is_refused(reward_server: str, body: Any) -> None:
    response = httpx.post(f"{reward_server}/score", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 400


def test_a_server_that_is_away_is_waited_for_through_the_pool(reward_server: str, serve: Serve) -> None:
    """Three tries fail, as those at a server that restarts; the fourth is answered."""
    statuses = iter([503, 429, 500])

    def answer(path: str, body: Any) -> Reply:
        return (200, {"status": "ok"}) if path == "/health" else (next(statuses, 200), {"scores": [0.25, 0.5]})

    stand_in = serve(answer)
    pool = RewardPool([RewardConfig(name="remote", timeout_s=60.0, args={"url": stand_in.url})], num_workers=1)
    try:
        [note] = pool.check()
        outcome = pool.submit("p", ["a", "b"], {"level": 3}).result()
    finally:
        pool.close()
    assert "waits up to 60 s" in note
    assert (outcome.rewards, outcome.errors) == ((0.25, 0.5), ())
    paths = [path for path, _, _ in stand_in.requests]
    assert paths == ["/health"] + ["/score"] * 4
    assert stand_in.requests[-1][1] == {"prompts": ["p"] * 2, "completions": ["a", "b"], "fields": {"level": [3, 3]}}


def test_a_server_that_stays_away_masks_the_group_and_says_why() -> None:
    args = {"url": "http://127.0.0.1:9"}
    pool = RewardPool([RewardConfig(name="remote", timeout_s=1.5, args=args)], num_workers=1)
    try:
        with pytest.raises(ConfigError, match=r"did not answer.*ConnectError.*Start the server"):
            pool.check()
        outcome = pool.submit("p", ["a"], {}).result()
    finally:
        pool.close()
    assert outcome.valid == (False,)
    assert "did not answer within the call's deadline" in outcome.errors[0]


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        ((401, {}), ConfigError, "the key was refused"),
        ((404, {}), ConfigError, "nothing at this address"),
        ((413, "too long"), AnswerError, "413"),
        ((200, {"score": 1}), AnswerError, "not a list of scores"),
        ((200, [1.0, 2.0]), ConfigError, "2 scores for 1 completions"),
    ],
)
def test_what_no_later_try_could_mend_is_an_error_at_once(
    serve: Serve, reply: Reply, error: type[Exception], words: str
) -> None:
    stand_in = serve(lambda path, body: reply)
    with pytest.raises(error, match=words):
        ask("a", url=stand_in.url, timeout_s=60.0)
    assert len(stand_in.requests) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"url": "judge:8200"}, "begins with http"),
        ({"url": "http://judge:8200", "api_key_env": "NO_SUCH_KEY_HERE"}, "launch.pass_env"),
    ],
)
def test_an_address_or_key_that_is_none_is_refused_before_a_run(args: dict[str, str], words: str) -> None:
    pool = RewardPool([RewardConfig(name="remote", args=args)], num_workers=1)
    try:
        with pytest.raises(ConfigError, match=words):
            pool.check()
    finally:
        pool.close()


def test_the_command_refuses_to_serve_without_a_token_or_a_port() -> None:
    done = call("reward-server", "--reward", "repetition")
    assert (done.exit_code, "openssl rand" in done.stderr) == (78, True)


def test_violations_of_a_served_reward_are_failures_with_its_words(reward_server: str) -> None:
    pool = RewardPool([RewardConfig(name="remote", timeout_s=30.0, args={"url": reward_server, "api_key_env": KEY})], 1)
    try:
        outcome = pool.submit("p", ["a"], {}).result()
    except RewardError as error:
        pytest.fail(f"a column that the server's reward lacks ended the run: {error}")
    finally:
        pool.close()
    assert "missing a required argument: 'level'" in outcome.errors[0]
