"""A reward server beside the head of two hosts: it never comes up, or is killed while both hosts are scored by it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from hpc_grpo.run.files import read_jsonl
from tests.places.conftest import residue_of, wait_until
from tests.places.scene import DEADLINE_S, Scene
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

HEAD, WORKER = "host1", "host2"
TOKEN = "HPC_GRPO_REWARD_TOKEN"
PORT, STEPS = 8200, 6
LEAST = 2.0
NEVER_ZERO = f"""
import time


def score(prompts, completions, **columns):
    time.sleep(0.3)  # so that a kill meets requests
    return [{LEAST} + len(set(completion)) / 100 for completion in completions]
"""


def server(command: list[str], deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    asked = {"command": command, "health_url": f"http://127.0.0.1:{PORT}/health"}
    return {"hosts": [HEAD, WORKER], "reward_server": asked, "bringup_deadline_s": deadline_s}


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "deadline_s", "how"),
    [
        ("echo CUDA out of memory; exit 3", DEADLINE_S, "ended with exit code 3 before it answered"),
        ("echo loading shard 1 of 900; exec sleep 600", 5.0, "did not answer at http://127.0.0.1:8200/health within"),
    ],
    ids=["ends", "hangs"],
)
def test_a_server_that_never_comes_up_ends_the_run_with_69_and_its_log(
    hosts: Bed, request: pytest.FixtureRequest, script: str, deadline_s: float, how: str
) -> None:
    name = f"absent-{request.node.callspec.id}"
    with Scene(hosts, name, launch=server(["sh", "-c", script], deadline_s)) as scene:
        command = scene.start(HEAD, "train", str(scene.config))
        assert command.wait() == 69, command.text
        print(command.text)
        assert how in command.text
        assert script.partition(";")[0].removeprefix("echo ") in command.text
        (attempt,) = scene.attempts
        assert (attempt.exit_kind, attempt.exit_code) == ("bringup_failed", 69)
        assert scene.step == 0
    assert residue_of(hosts) == {}


def test_a_server_that_is_killed_is_started_again_and_nothing_is_scored_0(hosts: Bed) -> None:
    reward = {
        "name": "remote",
        "timeout_s": 120,
        "args": {"url": f"http://{hosts.address(HEAD)}:{PORT}", "token_env": TOKEN},
    }
    script = hosts.storage(HEAD) / "never_zero.py"
    script.write_text(NEVER_ZERO)
    words = ["--reward", f"{script}:score", "--host", "0.0.0.0", "--port", str(PORT), "--workers", "2"]
    launch = server([sys.executable, "-m", "hpc_grpo.cli", "reward", "serve", *words])
    sections: dict[str, Any] = {"rewards": [reward], "rollout": {"logged_fraction": 1.0}}
    with Scene(hosts, "killed-server", launch=launch, train={"total_steps": STEPS}, **sections) as scene:
        command = scene.start(HEAD, "train", str(scene.config), **{TOKEN: "t0ken-93c-long-enough"})
        scene.wait_for_step(2)
        for pid in _servers(hosts):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "starting it again" in command.text, DEADLINE_S, "it is started again")
        assert command.wait() == 0, command.text
        assert "The reward server ended with -9; starting it again." in command.text
        assert scene.is_complete_to_the_end()
        lines = [line for step in range(1, STEPS + 1) for line in read_jsonl(scene.run.rollouts(step))]
        print(f"{len(lines)} rollouts in {STEPS} steps, the lowest reward {min(line['reward'] for line in lines):.2f}")
        assert len(lines) == STEPS * 6 * 4
        assert all(line["valid"] and line["reward"] > LEAST for line in lines)
        assert "t0ken-93c-long-enough" not in command.text
    assert residue_of(hosts) == {}


def _servers(bed: Bed) -> list[int]:
    return [pid for pid, command in bed.processes(HEAD).items() if "reward serve" in command]
