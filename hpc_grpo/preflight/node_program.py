"""The doctor's process on one node: `python -m hpc_grpo.preflight.node_program`, started by nodes.py.

Reads the line of a `NodeSpec`, then one JSON request per line: {"ask": NAME, …arguments}, where NAME is a method of
`Node`. Writes one JSON line per answer: {"value": …} or {"error": …}. Ends when its stdin ends. Runs inside
launch.container like training, while a node agent runs outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.ray_command import collective_interfaces, node_address
from hpc_grpo.launch.environment import filtered
from hpc_grpo.preflight.folders import remove_own_folder
from hpc_grpo.preflight.network import nccl_network
from hpc_grpo.preflight.node_facts import gather
from hpc_grpo.run.files import write_atomic
from hpc_grpo.system.processes import die_with_parent

_LOOK_S = 0.2


class Node:
    """Answers requests about this node, as a node agent with the same spec would see it."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._canary: Path | None = None

    def clock(self) -> float:
        return time.time()

    def facts(self) -> dict[str, Any]:
        return asdict(gather(self._spec))

    def write_canary(self, path: str, text: str) -> None:
        self._canary = Path(path)
        write_atomic(self._canary, text)

    def read_canary(self, path: str, text: str, wait_s: float) -> bool:
        """Return whether the file has this text within `wait_s`. A shared file system may show the file late."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if Path(path).is_file() and Path(path).read_text() == text:
                return True
            time.sleep(_LOOK_S)
        return False

    def measure(self, probe: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Run the torch probe with a learner's environment. Return its measurements and its error."""
        environ = filtered(os.environ, self._spec.pass_env, self._spec.env)
        interface, _ = node_address(self._spec)
        environ |= {**collective_interfaces(interface, environ), "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "hpc_grpo.preflight.torch_probe", json.dumps(probe)]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environ, preexec_fn=die_with_parent()
        ) as process:
            try:
                output, errors = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
                errors += f"\nnot done after {deadline_s:.0f} s".encode()
        lines, last_words = (text.decode(errors="replace").strip().splitlines() for text in (output, errors))
        results = [json.loads(line) for line in lines if line.startswith('{"sees_gpus"')]
        error = last_words[-1] if last_words and process.returncode else ""
        return {**(results[-1] if results else {}), "error": error, "nccl_network": nccl_network(lines)}

    def close(self) -> None:
        """Remove the canary and its folder. If nodes have their own disks, only this node sees them."""
        if self._canary is not None:
            remove_own_folder(self._canary.parent)


def answer(node: Node, line: bytes) -> str:
    request = json.loads(line)
    try:
        return json.dumps({"value": getattr(node, request.pop("ask"))(**request)})
    except (HpcGrpoError, OSError, ValueError, subprocess.SubprocessError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    node = Node(NodeSpec.from_line(sys.stdin.buffer.readline()))
    try:
        for line in sys.stdin.buffer:
            print(answer(node, line), flush=True)
    finally:
        node.close()


if __name__ == "__main__":
    main()
