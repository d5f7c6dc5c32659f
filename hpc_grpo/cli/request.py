"""Resolve what the user asked for: a CONFIG argument (YAML, the name of a shipped config, or `.sh`) and overrides.

A `.sh` config is a shell file that sets TRAINING_ARGS, exports variables and sets a few launch settings.
TRAINING_ARGS (an array, or a string) holds the words after `hpc-grpo train`, or options of open-instruct. Bash sources
the file once and prints the resulting values with NUL between them, so no value is parsed twice.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from hpc_grpo.cli.foreign import notes, refuse
from hpc_grpo.cli.options import echo, open_run, run_unless_config
from hpc_grpo.config import Config, load_config
from hpc_grpo.config.checked import InvalidConfigError
from hpc_grpo.config.load import find_config, load_values, overridden, read_layers
from hpc_grpo.errors import ConfigError
from hpc_grpo.foreign.open_instruct import of_training_args, read
from hpc_grpo.foreign.systems import SYSTEMS, counterpart
from hpc_grpo.foreign.table import Kind
from hpc_grpo.launch.environment import is_allowed, is_denied
from hpc_grpo.launch.freeze import reconfigured
from hpc_grpo.launch.place import find_place
from hpc_grpo.launch.place.job_queue import JobQueue
from hpc_grpo.system.commands import run_command

SETTINGS: dict[str, str] = {
    "MAX_JOB_CHAINS": "launch.slurm.max_job_chains",
    "NUM_NODES": "launch.num_nodes",
    "TIME_MIN": "launch.slurm.time_min",
    "PARTITION": "launch.slurm.partition",
    "ACCOUNT": "launch.slurm.account",
}
"""Shell variable of a `.sh` config -> config key."""
_BASE = "BASE"
"""Shell variable with the config that options of open-instruct build on, such as a site's."""
_OWN = (*SETTINGS, _BASE, "TRAINING_ARGS")

_DEADLINE_S = 60.0
_NOT_OURS = ("_", "SHLVL", "PWD", "OLDPWD", "BASH_", "LMOD_", "_LM", "__LMOD", "MODULE", "LOADEDMODULES", "MANPATH")
"""Prefixes of variables that bash or the modules system sets for this shell. They do not belong to the run."""

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
    """A resolved config, the overrides that led to it, and the variables that a `.sh` config exported.

    `told` lists the differences from the options of another system.
    """

    config: Config
    overrides: list[str]
    exported: dict[str, str] = field(default_factory=dict)
    told: str = ""

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **self.exported}

    def tell(self) -> None:
        """Print the differences from the options of another system."""
        if self.told:
            echo(self.told, err=True)

    def for_queue(self, queue: JobQueue) -> Request:
        """Return the request with the user's settings for `queue` in keys that the config does not set."""
        launch = queue.with_own_settings(self.config.launch, self.environ)
        return replace(self, config=self.config.model_copy(update={"launch": launch}))


@dataclass(frozen=True)
class ShellConfig:
    """The content of a `.sh` config. `exported` are the variables that the file exported or changed.

    With `options` of open-instruct, `config_name` is the value of BASE, or empty.
    """

    config_name: str
    overrides: list[str]
    exported: dict[str, str]
    options: list[str]


def load_request_or_run(config_name: str, overrides: Sequence[str]) -> Request:
    """Load CONFIG, or the config of RUN, with `overrides`. Raises ConfigError."""
    if run_unless_config(config_name) is None:
        return load_request(config_name, overrides)
    return Request(reconfigured(open_run(config_name), overrides), [*overrides])


def load_request(config_name: str, overrides: Sequence[str]) -> Request:
    """Load CONFIG with `overrides`, which win over those of a `.sh`. Raises ConfigError."""
    if not config_name.endswith(".sh"):
        return Request(_loaded(config_name, overrides), list(overrides))
    shell = read_shell_config(find_config(config_name))
    all_overrides, environ = [*shell.overrides, *overrides], {**os.environ, **shell.exported}
    if shell.options:
        config, told = _translated(config_name, shell, all_overrides, environ)
    else:
        config, told = _loaded(shell.config_name, all_overrides, environ), ""
    return Request(with_exported(config, shell.exported), all_overrides, shell.exported, told)


def _loaded(name: str, overrides: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    with naming_our_keys():
        return load_config(name, overrides, environ)


@contextmanager
def naming_our_keys() -> Iterator[None]:
    """Add our key to an error of the block about an unknown key of another system."""
    try:
        yield
    except InvalidConfigError as error:
        lines = [
            f"{unknown[0]}: unknown key. {ours}" if unknown and (ours := counterpart(*unknown)) else line
            for line, unknown in error.lines.items()
        ]
        raise InvalidConfigError(error.origin, dict.fromkeys(lines)) from None


def _translated(
    origin: str, shell: ShellConfig, overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[Config, str]:
    """Translate options of open-instruct's fork for Slurm. Return the config, and a text on the differences.

    In a job the number of GPUs is known; elsewhere it comes from BASE and the overrides. Raises ConfigError for options
    that cannot be translated, and for keys that the user must set.
    """
    base = read_layers(find_config(shell.config_name)) if shell.config_name else {}
    launch, place = overridden(base, overrides).get("launch", {}), find_place(environ)
    of_job = place.node_resources().num_gpus if place.queue is not None else 0
    gpus = of_job or launch.get("slurm", {}).get("gpus_per_node", 0)
    nodes = 1 if of_job else launch.get("num_nodes", 1)
    translation = SYSTEMS["open_instruct"].translated(of_training_args(read(shell.options), nodes, gpus))
    missing = [*translation.of(Kind.REFUSED), *translation.unset(overrides)]
    refuse(origin, missing, "Change it there, or give KEY=VALUE, such as launch.slurm.gpus_per_node=4.")
    config = load_values(translation.values, overrides, origin, base, environ)
    different = [*translation.of(Kind.UNKNOWN), *translation.of(Kind.DIFFERS)]
    return config, f"{origin} has options of open-instruct. What is different here:{notes(different)}"


def with_exported(config: Config, exported: dict[str, str]) -> Config:
    """Return `config` with the names of the exported variables in `launch.pass_env`, so that they reach training.

    config.yaml must not get their values: one of them may be a secret, and the file stays on disk.
    """
    new = [name for name in exported if not is_allowed(name) and not is_denied(name)]
    launch = config.launch.model_copy(update={"pass_env": [*dict.fromkeys([*config.launch.pass_env, *new])]})
    return config.model_copy(update={"launch": launch})


def read_shell_config(path: Path) -> ShellConfig:
    """Source the file and collect what it set. Raises ConfigError with bash's own message."""
    if os.access(path, os.R_OK) and re.search(rb"(?m)^[ \t]*[^#\s].*\r$", path.read_bytes()):
        raise ConfigError(f"{path} has Windows line ends. Remove them: sed -i 's/\\r$//' {shlex.quote(str(path))}")
    # A setting in the caller's shell must not count as a setting of the file.
    before = {name: value for name, value in os.environ.items() if name not in _OWN}
    kind, count, *rest = _sourced(path, before)
    words, (base, *rest) = rest[: int(count)], rest[int(count) :]
    if kind == "unset":
        raise ConfigError(f"{path} does not set TRAINING_ARGS, the words after `hpc-grpo train`, such as my.yaml.")
    if kind == "string":
        words = shlex.split(words[0], comments=True)
    values, pairs = rest[: len(SETTINGS)], (entry.partition("=") for entry in rest[len(SETTINGS) :] if "=" in entry)
    # the run's own variables: new or changed, and no settings
    new = {name: value for name, _, value in pairs if before.get(name) != value}
    exported = {name: value for name, value in new.items() if not name.startswith(_NOT_OURS) and name not in _OWN}
    settings = [f"{key}={value}" for key, value in zip(SETTINGS.values(), values, strict=True) if value]
    if words and words[0].startswith("--") and words[0].partition("=")[0] != "--set":
        return ShellConfig(base, settings, exported, words)
    config_name, overrides = _parse_words(words, path)
    beside = path.parent / config_name  # a file in the working directory wins
    if not Path(config_name).is_file() and beside.is_file():
        config_name = str(beside)
    return ShellConfig(config_name, [*settings, *overrides], exported, [])


def _sourced(path: Path, environ: dict[str, str]) -> list[str]:
    """Run _PROGRAM on the file and return the fields that it printed. Raises ConfigError if the file fails."""
    command = ["bash", "--noprofile", "--norc", "-c", _PROGRAM, "bash", str(path.absolute()), _BASE, *SETTINGS]
    answer = run_command(command, _DEADLINE_S, environ=environ, stdin="")
    if answer.is_late:
        raise ConfigError(f"{path} did not finish within {_DEADLINE_S:.0f} s; it must only set variables.")
    if answer.error:
        raise ConfigError(f"{path} failed: {answer.error}.")
    fields = answer.text.split("\0")
    if len(fields) < 2:
        raise ConfigError(f"{path} ended the shell (exit) instead of only setting variables. {answer.said}")
    return fields


def _parse_words(words: list[str], path: Path) -> tuple[str, list[str]]:
    """Split TRAINING_ARGS into CONFIG and overrides, in the grammar of `hpc-grpo train`."""
    names: list[str] = []
    overrides: list[str] = []
    if words and words[-1] == "--set":
        raise ConfigError(f"{path}: TRAINING_ARGS ends with --set; KEY=VALUE must follow.")
    for before, word in pairwise(["", *words]):
        if before == "--set" or word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
        elif word.startswith("-") and word != "--set":
            raise ConfigError(f"{path}: TRAINING_ARGS has {word!r}; valid are CONFIG and KEY=VALUE.")
        elif word != "--set":
            (overrides if "=" in word else names).append(word)
    if len(names) != 1:
        raise ConfigError(f"{path}: TRAINING_ARGS must name exactly one config, not {names or 'none'}.")
    return names[0], overrides
