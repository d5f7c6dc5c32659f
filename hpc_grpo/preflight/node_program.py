"""The doctor's process on one node: `python -m hpc_grpo.preflight.node_program`.

Reads one JSON request a line on stdin and answers each with one JSON line on stdout: {"value": …} or {"error": …}. Ends
with stdin. The requests are the functions of `_ANSWERS`.
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
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.ray_command import collective_interfaces
from hpc_grpo.launch.environment.rules import filtered
from hpc_grpo.preflight.folders import remove_own_folder
from hpc_grpo.preflight.network import nccl_network
from hpc_grpo.preflight.node_facts import gather
from hpc_grpo.run.files import write_atomic
from hpc_grpo.system.processes import die_with_parent

_SEE_AGAIN_S = 0.2


def clock() -> float:
    """This node's unix time."""
    return time.time()


def facts(spec: dict[str, Any]) -> dict[str, Any]:
    return asdict(gather(NodeSpec(**spec)))


def write_canary(path: str, text: str) -> None:
    write_atomic(Path(path), text)


def read_canary(path: str, text: str, wait_s: float) -> bool:
    """Whether the file shows up with this text; a shared file system may take its time."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if Path(path).is_file() and Path(path).read_text() == text:
            return True
        time.sleep(_SEE_AGAIN_S)
    return False


def remove_canary(path: str) -> None:
    """Take away the file and its folder: on this node, where a folder that is not shared lies."""
    remove_own_folder(Path(path).parent)


def measure(
    probe: dict[str, Any], interface: str, deadline_s: float, env: dict[str, str], pass_env: list[str]
) -> dict[str, Any]:
    """Run the torch probe as a learner would run here; what it measured, and what went wrong."""
    environ = filtered(os.environ, pass_env, env)
    environ |= {**collective_interfaces(interface, environ), "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_grpo.preflight.torch_probe", json.dumps(probe)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        preexec_fn=die_with_parent(),
    )
    try:
        printed, complained = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, complained = process.communicate()
        complained += f"\nnot done after {deadline_s:.0f} s"
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"sees_gpus"')]
    said = complained.strip().splitlines()
    error = said[-1] if said and process.returncode else ""
    return {
        **(found[-1] if found else {}),
        "error": error,
        "nccl_network": nccl_network(printed.splitlines()),
    }


_ANSWERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (clock, facts, write_canary, read_canary, remove_canary, measure)
}


def answer(line: str) -> str:
    """The reply to one request, {"ask": NAME, …arguments}."""
    request = json.loads(line)
    name = request.pop("ask")
    try:
        return json.dumps({"value": _ANSWERS[name](**request)})
    except (HpcGrpoError, OSError, ValueError, subprocess.SubprocessError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    for line in sys.stdin:
        print(answer(line), flush=True)


if __name__ == "__main__":
    main()
