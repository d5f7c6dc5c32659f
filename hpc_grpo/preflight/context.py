"""What the checks of the login node look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.config import Config, LaunchConfig
from hpc_grpo.launch.environment.rules import filtered

DEFAULT_ROOT = Path("runs")


@dataclass(frozen=True)
class Context:
    """`config` is None without a CONFIG, or with one that does not load for the reason `config_error`.

    `environ` is the environment of the shell, with what a .sh config exports.
    """

    config: Config | None
    launch: LaunchConfig
    environ: Mapping[str, str]
    config_error: str = ""

    @property
    def why_no_config(self) -> str:
        return "the CONFIG does not load" if self.config_error else "give a CONFIG"

    @property
    def root(self) -> Path:
        """Where run directories are made, absolute."""
        return self.config.run.root if self.config else DEFAULT_ROOT.absolute()

    @property
    def job_environ(self) -> Mapping[str, str]:
        """`environ` with launch.env, but for what only a job's own variables can complete."""
        in_job = filtered(self.environ, (), self.launch.env)
        return {**self.environ, **{name: value for name, value in in_job.items() if "$" not in value}}
