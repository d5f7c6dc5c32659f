"""A reward server that dies during a run and comes back: real training, a real server, SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_grpo.run.files import read_jsonl
from tests.integration.training_runs import LETTERS, Attempt, metrics_of, run_to_end, tiny_config
from tests.support.processes import free_port

TOKEN = "HPC_GRPO_REWARD_TOKEN"
STEPS, AWAY_S = 6, 10.0


def start_server(port: int, reward: str = LETTERS) -> subprocess.Popen[str]:
    """Start a server, and wait until it says where it serves."""
    command = [sys.executable, "-m", "hpc_grpo.cli", "reward", "serve", "--reward", reward, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == f"Serving on http://127.0.0.1:{port}\n"
    return server


@pytest.mark.integration
@pytest.mark.long
def test_training_waits_for_a_server_that_was_killed_and_scores_nothing_zero(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "t0ken-93c-long-enough")
    port = free_port()
    remote = {"name": "remote", "timeout_s": 200, "args": {"url": f"http://127.0.0.1:{port}", "token_env": TOKEN}}
    config = tiny_config(
        workspace,
        "remote",
        rewards=[remote],
        train={"total_steps": STEPS},
        launch={"object_store_gib": 0.1, "pass_env": [TOKEN]},
    )
    server = start_server(port)
    try:
        with Attempt(config) as attempt:
            attempt.wait_for_step(2)
            server.kill()
            server.wait()
            # On-policy: what was graded when the server died is one step at most.
            before = len(list(read_jsonl(attempt.run_dir.ledger)))
            time.sleep(AWAY_S)
            assert attempt.process.poll() is None, attempt.text
            assert len(list(read_jsonl(attempt.run_dir.ledger))) <= before + 1 < STEPS
            server = start_server(port)
            run_dir = attempt.wait_to_end()
    finally:
        server.terminate()
        server.wait()
    undisturbed = tiny_config(workspace, "local", train={"total_steps": STEPS})
    wanted, found = metrics_of(run_to_end(undisturbed).run_dir), metrics_of(run_dir)
    assert list(found) == list(range(1, STEPS + 1))
    print([(step, values["reward/mean"], values["time/generate_wait_s"]) for step, values in found.items()])
    assert [values["reward/mean"] for values in found.values()] == [values["reward/mean"] for values in wanted.values()]
    assert {values["reward/invalid_fraction"] for values in found.values()} == {0.0}
    assert max(values["time/generate_wait_s"] for values in found.values()) > AWAY_S / 2
    assert "answers; while it is away, training waits up to 200 s a group" in attempt.text
    assert "t0ken-93c-long-enough" not in attempt.text
