"""Watches, through a probe process, which nodes and GPUs have joined Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_grpo.launch.agent.protocol import NodeReport
from hpc_grpo.launch.supervisor.agent_link import LineReader
from hpc_grpo.system.processes import die_with_parent

_RETRY_S = 1.0


class RayWatch:
    """What the probe last saw. A probe that dies is started again: one failure is no dead cluster."""

    def __init__(self, address: str, env: Mapping[str, str], log_path: Path) -> None:
        self._command = [sys.executable, "-m", "hpc_grpo.launch.agent.ray_probe", address]
        self._env = dict(env)
        self._log_path = log_path
        self._gpus: dict[str, int] = {}
        self._closed = False
        self._process, self._reader = self._start()

    def sees(self, reports: Sequence[NodeReport | None]) -> bool:
        """Whether every node has reported Ray up and Ray shows each with all its GPUs."""
        return all(self._joined(report) for report in reports)

    def missing(self, reports: Mapping[str, NodeReport | None]) -> list[str]:
        return [node for node, report in reports.items() if not self._joined(report)]

    def fileno(self) -> int:
        return -1 if self._closed or self._process.poll() is not None else self._reader.fileno()

    def read(self) -> None:
        """Take in what the probe has printed, and start it again where it died."""
        if self._closed:
            return
        for line in self._reader.lines():
            self._gpus = dict(json.loads(line)["nodes"])
        if self._process.poll() is not None and time.monotonic() >= self._restart_at:
            self._process, self._reader = self._start()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._process.kill()  # it holds nothing: Ray drops its connection
            self._process.wait()

    def _joined(self, report: NodeReport | None) -> bool:
        return report is not None and self._gpus.get(report.ip, -1) >= report.num_gpus

    def _start(self) -> tuple[subprocess.Popen[bytes], LineReader]:
        self._restart_at = time.monotonic() + _RETRY_S
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        assert process.stdout is not None
        return process, LineReader(process.stdout)
