"""The parts of a job script that are the same for every queue: which Python runs, and the shell lines before it."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig


def job_python(launch: LaunchConfig) -> str:
    """Return the Python of jobs: `launch.python`, else this one. Raises ConfigError if this one has no Ray."""
    if launch.python is not None:
        return launch.python
    if find_spec("ray") is None:
        raise ConfigError(
            f"This Python has no Ray, and jobs would run it: {sys.executable}. Set launch.python to that of an "
            f"installation with Ray (pip install -e '.[gpu]') on a file system that the nodes see."
        )
    return sys.executable


def setup_lines(launch: LaunchConfig) -> list[str]:
    """Return the shell lines before the command: modules and what the site wants."""
    modules = ["module reset", *(f"module load {shlex.quote(name)}" for name in launch.modules)]
    return [*(modules if launch.modules else []), *launch.setup_lines]
