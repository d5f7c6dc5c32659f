"""Processes of environments: sessions, failures, and what is lost with a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.episodes.workers import EnvironmentFailedError, EnvironmentLostError, EnvironmentWorkers, first_answer
from hpc_grpo.errors import EXIT_CRASH, ConfigError, EnvironmentLateError, LaunchError

FILE = Path(__file__).with_name("playing.py")


@contextlib.contextmanager
def workers_of(name, **keys):
    workers = EnvironmentWorkers(EnvironmentConfig(name=f"{FILE}:{name}", **{"num_workers": 1, **keys}))
    yield workers
    workers.close()


def play(name, *messages, row=None, seed=1, **keys):
    async def played():
        with workers_of(name, **keys) as workers:
            session, answer = await workers.reset(row or {"what": "a number"}, seed)
            return [answer, *[await session.step(message) for message in messages]]

    return asyncio.run(played())


def test_an_environment_gets_the_row_and_answers_with_messages_rewards_and_metrics():
    first, second = play("Guess", "9", args={"highest": 3})
    assert first.messages == [{"role": "user", "content": "Guess a number from 1 to 3."}]
    assert (second.reward, second.done, second.metrics) == (0.0, False, {"guesses": 1.0})


def test_a_session_draws_the_same_from_random_whatever_others_draw_in_its_process():
    async def beside_others():
        with workers_of("Guess") as workers:
            session, _ = await workers.reset({"what": "a number"}, 5)
            other, _ = await workers.reset({"what": "a number"}, 6)
            drawn = [(await session.step("0")).messages]
            await other.step("0")
            return [*drawn, (await session.step("0")).messages]

    alone = [answer.messages for answer in play("Guess", "0", "0", seed=5)[1:]]
    assert asyncio.run(beside_others()) == alone
    assert [answer.messages for answer in play("Guess", "0", seed=6)[1:]] != alone[:1]


def test_async_environments_answer_beside_each_other():
    async def both():
        with workers_of("Slow") as workers:
            sessions = [(await workers.reset({}, seed))[0] for seed in range(8)]
            start = time.monotonic()
            await asyncio.gather(*(session.step("1.0") for session in sessions))
            return time.monotonic() - start

    assert asyncio.run(both()) < 4.0  # eight seconds one after another


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("raise", "KeyError: 'level'"),
        ("nonsense", "must return a hpc_grpo.Turn, not 3"),
        ("silent", "needs an observation"),
        ("nan", "must be a finite number"),
        ("vast", "must be a finite number"),
        ("ours", "the name 'turns', which hpc-grpo measures itself as episode/turns; give it another name than env_s,"),
        ("half", "surrogates not allowed"),
        ("long", "characters is longer"),
        ("wide", "characters is longer"),
        ("hang", "did not end within 0.5 s"),
        ("late", "did not end within 0.5 s"),
        ("own deadline", "step TimeoutError"),
        ("set", "not JSON serializable"),
        ("eat", "MemoryError"),
        ("quit", "SystemExit: 4"),
    ],
)
def test_what_an_environment_does_wrong_fails_its_own_session(message, told):
    with pytest.raises(EnvironmentFailedError, match=told):
        play("Bad", message, timeout_s=0.5 if message in ("hang", "late") else 30.0)


def test_a_reset_that_raises_is_a_failure_of_the_episode():
    with pytest.raises(EnvironmentFailedError, match="no such level"):
        play("Bad", row={"raises": True})


@pytest.mark.parametrize("program", ["exit 1", "exec /bin/true"])
def test_an_interpreter_that_ends_at_once_is_refused_in_words(tmp_path: Path, program: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    environment = EnvironmentConfig(name=f"{FILE}:Guess", python=str(python))
    with pytest.raises(ConfigError, match=r"cannot begin with the first row of data\.train: its process ended"):
        first_answer("data.train", environment, {})


@pytest.mark.parametrize("message", ["exit", "close"])
def test_a_process_that_ends_loses_its_sessions_and_the_next_one_has_another(message):
    async def played():
        with workers_of("Bad", timeout_s=1.0) as workers:
            session, _ = await workers.reset({}, 1)
            other, _ = await workers.reset({}, 2)
            with pytest.raises((EnvironmentLostError, EnvironmentFailedError)):
                await session.step(message)
            with pytest.raises(EnvironmentLostError):
                await other.step("go")
            session, _ = await workers.reset({}, 1)
            return await session.step("go")

    assert asyncio.run(played()).reward == 0.5


def test_a_call_that_hangs_fails_and_the_sessions_beside_it_are_lost():
    async def played():
        with workers_of("Bad", timeout_s=0.5) as workers:
            hanging, _ = await workers.reset({}, 1)
            waiting, _ = await workers.reset({}, 2)
            return await asyncio.gather(hanging.step("hang"), waiting.step("go"), return_exceptions=True)

    first, second = asyncio.run(played())
    assert isinstance(first, EnvironmentFailedError)
    assert isinstance(second, EnvironmentLostError)


def step_beside(message, other, **keys):
    """Step one session of `Slow`, and another one right behind it."""

    async def played():
        with workers_of("Slow", **keys) as workers:
            sessions = [(await workers.reset({}, seed))[0] for seed in range(2)]
            steps = [session.step(text) for session, text in zip(sessions, (message, other), strict=True)]
            return await asyncio.gather(*steps, return_exceptions=True)

    return asyncio.run(played())


def test_an_async_environment_that_blocks_its_event_loop_is_named_and_loses_its_neighbour():
    first, second = step_beside("block 600", "0.5", timeout_s=1.0)
    assert isinstance(first, EnvironmentFailedError)
    assert "it blocks the event loop at " in str(first)
    assert "playing.py:" in str(first)
    assert isinstance(second, EnvironmentLostError)
    assert not second.is_suspect


def test_the_seconds_in_which_a_neighbour_blocks_the_event_loop_do_not_count_for_a_step():
    _, second = step_beside("block 3", "1.0", timeout_s=2.0)
    assert second.messages[0]["content"] == "again"


def test_a_process_that_is_stopped_is_no_fault_of_a_session():
    async def played():
        with workers_of("Bad", timeout_s=0.5) as workers:
            session, _ = await workers.reset({}, 1)
            os.kill(session._process._process.pid, signal.SIGSTOP)
            await session.step("go")

    with pytest.raises(EnvironmentLostError, match="SIGSTOP"):
        asyncio.run(played())


def test_what_an_environment_starts_ends_with_its_process():
    async def played():
        with workers_of("Bad") as workers:
            session, _ = await workers.reset({}, 1)
            await session.step("fork")
            group = session._process._process.pid
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            await asyncio.sleep(0.05)
        return False

    assert asyncio.run(played())


def test_a_flood_of_output_is_cut_and_holds_nobody_up(capfd):
    assert play("Bad", "flood", "go")[-1].reward == 0.5
    assert len(capfd.readouterr().err) < 2 << 20


@pytest.mark.parametrize(
    ("name", "told"), [("Broken", "no licence"), ("Missing", "has no 'Missing'"), ("Halfway", "has no method step")]
)
def test_an_environment_that_cannot_be_made_is_refused(name, told):
    with pytest.raises(ConfigError, match=told):
        play(name)


@pytest.mark.parametrize(("is_resume", "kind"), [(False, ConfigError), (True, LaunchError)])
def test_an_import_that_is_late_is_an_error_of_the_config_only_before_a_resume(monkeypatch, is_resume, kind):
    monkeypatch.setattr("hpc_grpo.episodes.workers._LOAD_S", 0.01)
    environment = EnvironmentConfig(name=f"{FILE}:Guess", num_workers=1)
    with pytest.raises(kind, match=r"was not imported within 0\.01 s\. Import it by hand") as caught:
        first_answer("data.train", environment, {"what": "a number"}, is_resume=is_resume)
    assert caught.value.exit_code == kind.exit_code


def test_an_import_that_is_late_when_a_killed_process_is_replaced_ends_the_driver_but_not_the_run(monkeypatch):
    async def played():
        with workers_of("Guess") as workers:
            session, _ = await workers.reset({"what": "a number"}, 1)
            session._process.kill("was killed")
            monkeypatch.setattr("hpc_grpo.episodes.workers._LOAD_S", 0.01)
            await workers.reset({"what": "a number"}, 1)

    with pytest.raises(EnvironmentLateError, match=r"was not imported within 0\.01 s\. Import it by hand") as caught:
        asyncio.run(played())
    assert caught.value.exit_code == EXIT_CRASH


def test_sessions_that_begin_together_are_spread_over_the_processes():
    async def spread():
        with workers_of("Bad", num_workers=4) as workers:
            await asyncio.gather(*(workers.reset({}, seed) for seed in range(8)))
            with pytest.raises(EnvironmentFailedError):
                await workers.reset({"raises": True}, 1)
            return [process.num_sessions for process in workers._processes]

    assert asyncio.run(spread()) == [2, 2, 2, 2]


def test_no_secret_reaches_an_environment_but_those_that_it_names(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2-abcdef")
    monkeypatch.setenv("OTHER_TOKEN", "hunter3-abcdef")

    async def environment():
        with workers_of("Bad", pass_env=["JUDGE_TOKEN"]) as workers:
            session, _ = await workers.reset({}, 1)
            return Path(f"/proc/{session._process._process.pid}/environ").read_bytes()

    variables = asyncio.run(environment())
    assert b"hunter2" in variables
    assert b"hunter3" not in variables
