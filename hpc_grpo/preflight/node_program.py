"""The doctor's process on one node: `python -m hpc_grpo.preflight.node_program`, started by nodes.py.

Reads one JSON request a line from stdin: {"ask": NAME, …arguments}, where NAME is a function of `_ANSWERS`. Writes one
JSON line an answer: {"value": …} or {"error": …}. Ends when stdin does. It runs where training would: inside
launch.container if there is one, while a node agent runs outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.agent.ray_command import collective_interfaces
from hpc_grpo.launch.environment import filtered
from hpc_grpo.preflight.folders import remove_own_folder
from hpc_grpo.preflight.network import nccl_network
from hpc_grpo.preflight.node_facts import gather
from hpc_grpo.run.files import write_atomic
from hpc_grpo.system.processes import die_with_parent

_LOOK_S = 0.2


def clock() -> float:
    return time.time()


def facts(spec: dict[str, Any]) -> dict[str, Any]:
    return asdict(gather(NodeSpec(**{**spec, "stage": Stage(**spec["stage"])})))


def write_canary(path: str, text: str) -> None:
    write_atomic(Path(path), text)


def read_canary(path: str, text: str, wait_s: float) -> bool:
    """Return whether the file shows up with this text; a shared file system may take its time."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if Path(path).is_file() and Path(path).read_text() == text:
            return True
        time.sleep(_LOOK_S)
    return False


def remove_canary(path: str) -> None:
    """Remove the file and its folder. Ask the node that wrote them: only this node sees a disk of its own."""
    remove_own_folder(Path(path).parent)


def measure(
    probe: dict[str, Any], interface: str, deadline_s: float, env: dict[str, str], pass_env: list[str]
) -> dict[str, Any]:
    """Run the torch probe with the environment of a learner; return what it measured, and its error."""
    environ = filtered(os.environ, pass_env, env)
    environ |= {**collective_interfaces(interface, environ), "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpc_grpo.preflight.torch_probe", json.dumps(probe)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        preexec_fn=die_with_parent(),
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            errors += f"\nnot done after {deadline_s:.0f} s"
    lines, last_words = output.splitlines(), errors.strip().splitlines()
    results = [json.loads(line) for line in lines if line.startswith('{"sees_gpus"')]
    error = last_words[-1] if last_words and process.returncode else ""
    return {**(results[-1] if results else {}), "error": error, "nccl_network": nccl_network(lines)}


_ANSWERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (clock, facts, write_canary, read_canary, remove_canary, measure)
}


def answer(line: str) -> str:
    request = json.loads(line)
    try:
        return json.dumps({"value": _ANSWERS[request.pop("ask")](**request)})
    except (HpcGrpoError, OSError, ValueError, subprocess.SubprocessError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer(line), flush=True)
