"""The reward server, and `remote` that asks it and servers like it, on loopback."""

from __future__ import annotations

import asyncio
import base64
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.grading import server as server_module
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.grading.server import RewardServer
from hpc_grpo.rewards import Group, finished, score
from hpc_grpo.rewards.builtin import servers
from hpc_grpo.rewards.builtin.servers import (
    AnswerError,
    RemoteSettings,
    UnansweredError,
    open_client,
)
from hpc_grpo.rewards.proved import MAGIC
from tests.support.command import call
from tests.support.processes import free_port
from tests.support.second_user import LISTENER, as_second_user
from tests.support.stand_in_server import Reply, Serve
from tests.support.tiny_vision import colour_image

TOKEN = "t0ken-1b7-long-enough"
KEY = "REWARD_TEST_KEY"


@pytest.fixture
def reward_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(KEY, TOKEN)
    own = tmp_path / "own.py"
    own.write_text(
        "def share(prompts, completions, level, **fields):\n"
        "    assert 'bad' not in completions, 'odd'\n"
        "    if 'slow' in completions: raise TimeoutError\n"
        "    return [len(text) / each for text, each in zip(completions, level)]\n"
    )
    pool = RewardPool([RewardConfig(name=f"{own}:share")], num_workers=1)
    with RewardServer(("127.0.0.1", 0), pool, TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
    pool.close()


def ask(*completions: str, level: int = 1, timeout_s: float = 10.0, **args: Any) -> list[float]:
    return score("remote", completions, {"level": level}, prompt="p", args=args, timeout_s=timeout_s)


def remote(timeout_s: float, **args: Any) -> closing[RewardPool]:
    """A pool whose one reward is `remote`, closed at the end of the block."""
    return closing(RewardPool([RewardConfig(name="remote", timeout_s=timeout_s, args=args)], num_workers=1))


def test_the_reward_server_scores_what_remote_asks(reward_server: str) -> None:
    assert ask("ab", "abcd", url=reward_server, token_env=KEY, level=2) == [1.0, 2.0]


def test_a_reward_on_the_server_gets_the_images_of_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of one request have the same images: `remote` asks about one prompt."""
    monkeypatch.setenv(KEY, TOKEN)
    own = tmp_path / "own.py"
    own.write_text(
        "def width(prompts, completions, images, level):\n"
        "    return [each[0].size[0] + len(each) * level[0] for each in images]\n"
    )
    files = (colour_image("red", (20, 30)), colour_image("blue"))
    hosted, asking = [RewardPool([RewardConfig(name=f"{own}:width")], 1)], []
    with RewardServer(("127.0.0.1", 0), hosted[0], TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        asking = [RewardPool([RewardConfig(name="remote", args={"url": url, "token_env": KEY})], 1)]
        outcome = asking[0].submit("p", ["a", "b"], {"level": 100}, images=files).result()
        server.shutdown()
    for pool in (*hosted, *asking):
        pool.close()
    assert (outcome.rewards, outcome.errors) == ((220.0, 220.0), ())


@pytest.mark.parametrize("protocol", ["hpc_grpo", "openrlhf"])
def test_other_servers_get_the_files_of_images(serve: Serve, protocol: str) -> None:
    """The key of the rewards in an answer is the protocol's own, whatever else the answer has."""
    key, other = ("scores", "rewards") if protocol == "hpc_grpo" else ("rewards", "scores")
    stand_in = serve(lambda path, body: (200, {key: [0.5, 1.0], other: [7.0, 7.0]}))
    file = base64.b64encode(content := colour_image("red")).decode()
    for images, prompt_field in ((), None), ((content, content), "message"):
        settings = RemoteSettings(url=stand_in.url, protocol=protocol, prompt_field=prompt_field)  # type: ignore[arg-type]
        group = Group("<image>?", ("4", "5"), {"answer": "4", "message": "[]"}, images=images)
        assert finished(servers.remote(group, settings)) == [0.5, 1.0]
    (path, without, _), (_, body, _) = stand_in.requests
    assert "images" not in without
    if protocol == "openrlhf":
        assert path == "/get_reward"
        assert body == {
            "query": ["<image>?4", "<image>?5"], "prompts": ["[]"] * 2, "labels": ["4"] * 2,
            "images": [[file, file]] * 2,
        }  # fmt: skip
    else:
        assert (path, body["completions"], body["images"]) == ("/score", ["4", "5"], [file, file])


def test_a_reward_that_fails_on_the_server_is_a_failure_here_and_no_zero(reward_server: str) -> None:
    with pytest.raises(AnswerError, match=r"422: .*AssertionError: odd"):
        ask("bad", url=reward_server, token_env=KEY)
    assert ask("ok", url=reward_server, token_env=KEY) == [2.0]


def test_a_deadline_missed_on_the_server_is_one_missed_here(reward_server: str) -> None:
    with pytest.raises(UnansweredError, match="status 503"):
        ask("slow", url=reward_server, token_env=KEY, timeout_s=2.0)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_reward_server_serves_nobody_without_its_token(reward_server: str, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for method, path in (("POST", "/score"), ("GET", "/health"), ("GET", "/nothing")):
        response = httpx.request(method, reward_server + path, json={}, headers=headers)
        assert (response.status_code, list(response.json())) == (401, ["error"])


@pytest.mark.parametrize(
    "body",
    [[], {}, {"prompts": ["p"]}, {"prompts": ["p"], "completions": [1]}, {"prompts": [], "completions": ["c"]},
     {"prompts": ["p"], "completions": ["c"], "fields": {"level": [1, 2]}},
     {"prompts": ["p"], "completions": ["c"], "images": ["no base64"]}],
)  # fmt: skip
def test_what_is_no_group_is_refused(reward_server: str, body: Any) -> None:
    async def post() -> httpx.Response:
        async with open_client(RemoteSettings(url=reward_server, token_env=KEY)) as client:
            return await client.post(f"{reward_server}/score", json=body)

    assert asyncio.run(post()).status_code == 400


def test_a_token_that_is_sent_is_no_proof(reward_server: str) -> None:
    """A caller that sends its token would give it to whoever holds the port."""
    response = httpx.post(f"{reward_server}/score", json={}, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (response.status_code, "token_env" in response.text) == (401, True)
    with pytest.raises(ConfigError, match=r"token_env"):
        ask("ab", url=reward_server, api_key_env=KEY, level=2)


def test_who_holds_the_port_learns_neither_token_nor_prompts_and_decides_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, TOKEN)
    heard = tmp_path / "heard"
    heard.touch()
    heard.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o001)
    with as_second_user(LISTENER, str(port := free_port()), str(heard)):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(AnswerError, match=r"has another token, or is not `hpc-grpo reward serve`"):
            ask("a secret completion", url=url, token_env=KEY, timeout_s=2.0)
        with remote(2.0, url=url, token_env=KEY) as pool:
            with pytest.raises(ConfigError, match="another token"):
                pool.check()
            outcome = pool.submit("a secret prompt", ["a secret completion"], {}).result()
    assert outcome.valid == (False,)
    said = heard.read_bytes()
    assert said.startswith(MAGIC)
    assert b"secret" not in said
    assert TOKEN.encode() not in said


def test_a_caller_with_another_token_is_refused(reward_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "another token, just as long")
    with pytest.raises(AnswerError, match="has another token"):
        ask("ab", url=reward_server, token_env="OTHER", level=2, timeout_s=1.5)
    assert ask("ab", url=reward_server, token_env=KEY, level=2) == [1.0]


@pytest.mark.parametrize("begin", [MAGIC, b"GET /health HTTP/1.1\r\n"], ids=["a proof", "a request"])
def test_who_sends_a_byte_now_and_then_is_hung_up_on(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.5)
    with RewardServer(("127.0.0.1", 0), MagicMock(), TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        slow = socket.create_connection(server.server_address, timeout=60.0)
        with pytest.raises(ConnectionError):
            for byte in [*begin, *bytes(60)]:
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        server.shutdown()


def test_a_thousand_idle_strangers_do_not_stop_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, TOKEN)
    command = [sys.executable, "-m", "hpc_grpo.cli", "reward", "serve", "--reward", "repetition", "--port", "0"]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (512, 512))
    server = subprocess.Popen([*command, "--token-env", KEY], stdout=subprocess.PIPE, text=True, preexec_fn=limit)
    strangers: list[socket.socket] = []
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for number in range(1000):
            source = (f"127.0.0.{2 + number % 50}", 0)
            strangers.append(socket.create_connection(address, timeout=10.0, source_address=source))
        assert ask("a b c", url=url, token_env=KEY, timeout_s=60.0) == [0.0]
    finally:
        for stranger in strangers:
            stranger.close()
        server.terminate()
        server.wait()


@pytest.mark.parametrize("token_env", [None, KEY])
def test_a_request_over_plain_http_obeys_no_proxy(
    reward_server: str, serve: Serve, monkeypatch: pytest.MonkeyPatch, token_env: str | None
) -> None:
    proxy = serve(lambda path, body: (200, {"scores": [9.0]}))
    own = serve(lambda path, body: (200, {"scores": [0.5]}))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if token_env:
        assert ask("ab", url=reward_server, token_env=token_env, level=2) == [1.0]
    else:
        assert ask("ab", url=own.url) == [0.5]
    assert proxy.requests == []


def test_a_server_over_https_is_asked_through_the_proxy_of_the_environment(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve(lambda path, body: (200, {}))
    monkeypatch.setenv("https_proxy", proxy.url)
    with pytest.raises(AnswerError, match=r"ProxyError|501"):
        ask("ab", url="https://judge.site", timeout_s=1.5)


@pytest.mark.parametrize(
    "args", [{"url": "https://judge:8200"}, {"url": "http://judge:8200", "api_key_env": KEY}]
)  # fmt: skip
def test_a_token_goes_with_plain_http_and_no_key(monkeypatch: pytest.MonkeyPatch, args: dict[str, str]) -> None:
    monkeypatch.setenv(KEY, TOKEN)
    with pytest.raises(ConfigError, match=r"hpc-grpo reward serve"):
        ask("ab", **args, token_env=KEY)


def test_a_server_that_is_away_is_waited_for_through_the_pool(reward_server: str, serve: Serve) -> None:
    """Three tries fail, as those at a server that restarts; the fourth is answered."""
    statuses = iter([503, 429, 500])

    def answer(path: str, body: Any) -> Reply:
        return (200, {"status": "ok"}) if path == "/health" else (next(statuses, 200), {"scores": [0.25, 0.5]})

    stand_in = serve(answer)
    with remote(60.0, url=stand_in.url) as pool:
        [note] = pool.check()
        outcome = pool.submit("p", ["a", "b"], {"level": 3}).result()
    assert "waits up to 60 s" in note
    assert (outcome.rewards, outcome.errors) == ((0.25, 0.5), ())
    paths = [path for path, _, _ in stand_in.requests]
    assert paths == ["/health"] + ["/score"] * 4
    assert stand_in.requests[-1][1] == {"prompts": ["p"] * 2, "completions": ["a", "b"], "fields": {"level": [3, 3]}}


def test_a_server_of_openrlhf_is_asked_in_its_own_protocol(serve: Serve) -> None:
    """As its math_verifier.py: no page for its health, and more lists in its answer than rewards."""

    def answer(path: str, body: Any) -> Reply:
        if path != "/get_reward":
            return 404, {}
        scores = [float(query.endswith(label)) for query, label in zip(body["query"], body["labels"], strict=True)]
        return 200, {"rewards": scores, "format_rewards": [9.0] * len(scores)}

    stand_in = serve(answer)
    with remote(30.0, url=stand_in.url, protocol="openrlhf", label_field="solution") as pool:
        pool.check()
        outcome = pool.submit("1 + 1 = ", ["2", "3"], {"solution": "2"}).result()
    assert outcome.rewards == (1.0, 0.0)
    assert stand_in.requests[-1][1] == {
        "query": ["1 + 1 = 2", "1 + 1 = 3"], "prompts": ["1 + 1 = "] * 2, "labels": ["2"] * 2
    }  # fmt: skip
    args = {"url": stand_in.url, "protocol": "openrlhf", "prompt_field": "message", "label_field": None}
    assert score("remote", ["2"], {"message": "[1 + 1]"}, args=args) == [1.0]
    assert stand_in.requests[-1][1]["labels"] == [""]
    del args["label_field"]
    assert score("remote", ["2"], {"answer": "2", "message": "[1 + 1]"}, args=args) == [1.0]
    assert stand_in.requests[-1][1]["prompts"] == ["[1 + 1]"]
    for missing, fields in (("label_field", {"message": "?"}), ("prompt_field", {"answer": "2"})):
        with pytest.raises(ConfigError, match=rf"no column .*rewards\.N\.args\.{missing}"):
            score("remote", ["2"], fields, args=args)


@pytest.mark.parametrize("protocol", ["hpc_grpo", "openrlhf"])
def test_an_url_with_the_path_that_is_added_to_it_is_refused(protocol: str) -> None:
    path = "/score" if protocol == "hpc_grpo" else "/get_reward"
    with pytest.raises(ValueError, match=r"set url to 'http://head:5000'"):
        RemoteSettings(url=f"http://head:5000{path}/", protocol=protocol)  # type: ignore[arg-type]
    assert RemoteSettings(url="http://score").url == "http://score"


def test_a_server_that_stays_away_masks_the_group_and_says_why() -> None:
    with remote(1.5, url="http://127.0.0.1:9") as pool:
        with pytest.raises(ConfigError, match=r"did not answer.*ConnectError.*Start the server"):
            pool.check()
        outcome = pool.submit("p", ["a"], {}).result()
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
        score("remote", ["a"], {}, args={"url": stand_in.url}, timeout_s=60.0)
    assert len(stand_in.requests) == 1


def test_a_key_that_is_not_set_is_refused_before_a_run() -> None:
    unset = remote(30.0, url="http://judge:8200", api_key_env="NO_SUCH_KEY_HERE")
    with unset as pool, pytest.raises(ConfigError, match=r"launch\.pass_env"):
        pool.check()


def test_the_command_refuses_to_serve_without_a_token_or_a_port() -> None:
    done = call("reward", "serve", "--reward", "repetition")
    assert (done.exit_code, "openssl rand" in done.stderr) == (78, True)


def test_violations_of_a_served_reward_are_failures_with_its_words(reward_server: str) -> None:
    with remote(30.0, url=reward_server, token_env=KEY) as pool:
        outcome = pool.submit("p", ["a"], {}).result()  # not a RewardError, which would end the run
    assert "missing a required argument: 'level'" in outcome.errors[0]
