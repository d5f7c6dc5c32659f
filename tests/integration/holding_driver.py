"""A driver that trains nothing: it keeps its cluster up for others, and tells them how to join."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpc_grpo.errors import EXIT_RESUMABLE
from hpc_grpo.run.contract import PULSE_VARIABLE
from hpc_grpo.run.files import write_json_atomic

ENVIRONMENT = "environment.json"

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    del os.environ[PULSE_VARIABLE]  # this process's own
    write_json_atomic(Path(sys.argv[1]) / ENVIRONMENT, dict(os.environ))
    signal.sigwait({signal.SIGTERM})
    sys.exit(EXIT_RESUMABLE)
