"""Resolve what the user asked for: a CONFIG argument (YAML, the name of a shipped config, or `.sh`) and overrides.

A `.sh` config is a shell file that sets TRAINING_ARGS, exports variables and sets a few launch settings.
TRAINING_ARGS (an array, or a string) holds the words after `hpc-grpo train`. Bash sources the file once and prints
what it left behind NUL-separated, so that no value is parsed twice.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_grpo.config import Config, load_config
from hpc_grpo.config.load import find_config
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.environment.rules import is_allowed, is_denied
from hpc_grpo.launch.place.job_queue import JobQueue

SETTINGS: dict[str, str] = {
    "MAX_JOB_CHAINS": "launch.slurm.max_job_chains",
    "NUM_NODES": "launch.num_nodes",
    "TIME_MIN": "launch.slurm.time_min",
    "PARTITION": "launch.slurm.partition",
    "ACCOUNT": "launch.slurm.account",
}
"""Shell variable of a `.sh` config -> config key."""

_DEADLINE_S = 60.0
_NOT_OURS = ("_", "SHLVL", "PWD", "OLDPWD", "BASH_", "LMOD_", "_LM", "__LMOD", "MODULE", "LOADEDMODULES", "MANPATH")
"""Prefixes of variables that bash or the modules system sets: true of this shell, not of the run."""

_PROGRAM = r"""
set -e
source "$1" 1>&2
if [[ "$(declare -p TRAINING_ARGS 2>/dev/null)" == "declare -a"* ]]; then
  printf 'array\0%s\0' "${#TRAINING_ARGS[@]}"
  for word in "${TRAINING_ARGS[@]}"; do printf '%s\0' "$word"; done
elif [[ -n "${TRAINING_ARGS+set}" ]]; then printf 'string\0001\0%s\0' "$TRAINING_ARGS"
else printf 'unset\0000\0'; fi
shift
for name in "$@"; do printf '%s\0' "${!name-}"; done
env -0
"""


@dataclass(frozen=True)
class Request:
    """A resolved config, the overrides that led to it, and the variables that a `.sh` config exported."""

    config: Config
    overrides: list[str]
    exported: dict[str, str] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **self.exported}

    def for_queue(self, queue: JobQueue) -> Request:
        """Return the request with what the user's own settings for `queue` ask for where the config is silent."""
        launch = queue.with_own_settings(self.config.launch, self.environ)
        return replace(self, config=self.config.model_copy(update={"launch": launch}))


@dataclass(frozen=True)
class ShellConfig:
    """Hold what a `.sh` config asks for; `exported` are the variables it exported or changed."""

    config_name: str
    overrides: list[str]
    exported: dict[str, str]


def load_request(config_name: str, overrides: Sequence[str]) -> Request:
    """Load CONFIG with `overrides`, which win over those of a `.sh`. Raises ConfigError."""
    if not config_name.endswith(".sh"):
        return Request(load_config(config_name, overrides), list(overrides))
    shell = read_shell_config(find_config(config_name))
    all_overrides = [*shell.overrides, *overrides]
    config = load_config(shell.config_name, all_overrides, {**os.environ, **shell.exported})
    return Request(with_exported(config, shell.exported), all_overrides, shell.exported)


def with_exported(config: Config, exported: dict[str, str]) -> Config:
    """Let the exported variables through to training.

    `launch.pass_env` keeps their names, never their values: no rule knows every secret, and config.yaml is kept.
    """
    new = [name for name in exported if not is_allowed(name) and not is_denied(name)]
    launch = config.launch.model_copy(update={"pass_env": [*dict.fromkeys([*config.launch.pass_env, *new])]})
    return config.model_copy(update={"launch": launch})


def read_shell_config(path: Path) -> ShellConfig:
    """Source the file and collect what it set. Raises ConfigError with bash's own message."""
    # A setting of the caller's shell is not one of the file.
    before = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "TRAINING_ARGS")}
    kind, count, *rest = _sourced(path, before)
    words, rest = rest[: int(count)], rest[int(count) :]
    if kind == "unset":
        raise ConfigError(f"{path} does not set TRAINING_ARGS, the words after `hpc-grpo train`, such as my.yaml.")
    if kind == "string":
        words = shlex.split(words[0], comments=True)
    values, exported = rest[: len(SETTINGS)], rest[len(SETTINGS) :]
    settings = [f"{key}={value}" for key, value in zip(SETTINGS.values(), values, strict=True) if value]
    config_name, overrides = _parse_words(words, path)
    beside = path.parent / config_name  # the working directory's wins
    if not Path(config_name).is_file() and beside.is_file():
        config_name = str(beside)
    return ShellConfig(config_name, [*settings, *overrides], _changed(exported, before))


def _sourced(path: Path, environ: dict[str, str]) -> list[str]:
    """Run _PROGRAM over the file; returns the fields it printed."""
    command = ["bash", "--noprofile", "--norc", "-c", _PROGRAM, "bash", str(path.absolute()), *SETTINGS]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_DEADLINE_S, env=environ, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{path} did not finish within {_DEADLINE_S:.0f} s; it must only set variables.") from error
    printed = done.stderr.decode(errors="replace").strip()
    if done.returncode:
        raise ConfigError(f"{path} failed with exit code {done.returncode}: {printed or 'it printed nothing'}")
    fields = done.stdout.decode(errors="surrogateescape").split("\0")
    if len(fields) < 2:
        raise ConfigError(f"{path} ended the shell (exit) instead of only setting variables. {printed}")
    return fields


def _parse_words(words: list[str], path: Path) -> tuple[str, list[str]]:
    """Split TRAINING_ARGS into CONFIG and overrides, in the grammar of `hpc-grpo train`."""
    names: list[str] = []
    overrides: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--set":
            if not queue:
                raise ConfigError(f"{path}: TRAINING_ARGS ends with --set; KEY=VALUE must follow.")
            overrides.append(queue.pop(0))
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
        elif word.startswith("-"):
            raise ConfigError(f"{path}: TRAINING_ARGS has {word!r}; valid are CONFIG, KEY=VALUE and --set KEY=VALUE.")
        elif "=" in word:
            overrides.append(word)
        else:
            names.append(word)
    if len(names) != 1:
        raise ConfigError(f"{path}: TRAINING_ARGS must name exactly one config, not {names or 'none'}.")
    return names[0], overrides


def _changed(exported: list[str], before: dict[str, str]) -> dict[str, str]:
    """Return the run's own variables among NAME=VALUE entries: new or changed, and no settings."""
    pairs = (entry.partition("=") for entry in exported if "=" in entry)
    new = {name: value for name, _, value in pairs if before.get(name) != value}
    return {
        name: value
        for name, value in new.items()
        if not name.startswith(_NOT_OURS) and name not in SETTINGS and name != "TRAINING_ARGS"
    }
