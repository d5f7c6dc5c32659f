"""The parts of a job script that are the same for every queue: which Python runs, and the shell lines before it."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_grpo.errors import EXIT_CONFIG, ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig


def job_python(launch: LaunchConfig) -> str:
    """Return the Python of jobs: `launch.python`, else this one. Raises ConfigError if Ray is neither here nor in one.

    In a container training has the image's.
    """
    if launch.python is not None:
        return launch.python
    if launch.container is None and find_spec("ray") is None:
        raise ConfigError(
            f"This Python has no Ray, and jobs would run it: {sys.executable}. Set launch.python to that of an "
            f"installation with Ray (pip install -e '.[gpu]') on a file system that the nodes see."
        )
    return sys.executable


def setup_lines(launch: LaunchConfig) -> list[str]:
    """Return the shell lines before the command: modules and what the site wants. A module that fails ends the shell.

    Without a CUDA or a network that its modules bring, training would fail much later, or be ten times slower.
    """
    modules = ["module reset", *map(_load, launch.modules)]
    return [*(modules if launch.modules else []), *launch.setup_lines]


def path_line(python: str | None) -> str:
    """Return the shell line that finds the programs beside `python` (hpc-grpo, ninja, ray) first; None: this one."""
    # After modules and profiles, which change PATH too.
    return f"export PATH={shlex.quote(str(Path(python or sys.executable).parent))}:$PATH"


def _load(module: str) -> str:
    command = f"module load {shlex.quote(module)}"
    told = (
        f"error: launch.modules: '{module}' could not be loaded on $(hostname). "
        f"Name a module that 'module avail' lists there, or take it out."
    )
    return f'{command} || {{ echo "{told}" >&2; exit {EXIT_CONFIG}; }}'
