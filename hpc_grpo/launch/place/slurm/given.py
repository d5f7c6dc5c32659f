"""Read the options that a user gave sbatch for a job: script directives, SBATCH_ variables, command line.

Slurm's record of a job has the values after defaults, rounding and a site's submit plugin, under names that a request
may not use. A successor requests the given options again, on top of the config. Pure functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.slurm.sbatch import long_options
from hpc_grpo.launch.place.slurm.text import minutes

_NO_LIMIT_MIN = 365 * 24 * 60
"""Stands for UNLIMITED and 0: a successor asks for a year."""

Options = dict[str, Any]
"""Options of sbatch by their long names. True means given without a value."""

_VARIABLES = {
    f"SBATCH_{name.replace('-', '_').upper()}": name
    for name in (  # noqa: SIM905
        "account constraint cpus-per-gpu exclusive gpus gpus-per-node gres hint mem-per-cpu mem-per-gpu network "
        "partition qos reservation wckey"
    ).split()
} | {"SBATCH_MEM_PER_NODE": "mem", "SBATCH_TIMELIMIT": "time"}
"""sbatch's variables for nodes, time and account -> the option of each."""

_NAMES = dict(
    pair.split("=")
    for pair in (  # noqa: SIM905
        "A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error "
        "F=nodefile G=gpus H=hold i=input J=job-name k=no-kill L=licenses M=clusters m=distribution N=nodes n=ntasks "
        "O=overcommit o=output p=partition Q=quiet q=qos S=core-spec s=oversubscribe t=time v=verbose W=wait "
        "w=nodelist x=exclude tasks-per-node=ntasks-per-node"
    ).split()
)
"""Short name -> long name. Also the one long option that has two names."""
_WITHOUT_VALUE = frozenset(
    "contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue overcommit oversubscribe "  # noqa: SIM905
    "parsable propagate quiet reboot requeue spread-job test-only use-min-nodes verbose wait "
    "consolidate-segments external oom-kill-step resv-ports spread-segments stepmgr".split()  # since Slurm 24.05
)
"""Options whose value, if any, follows an equals sign."""

_OF_ONE_JOB = frozenset(
    "array begin chdir clusters deadline dependency error get-user-env hold input job-name no-kill no-requeue "  # noqa: SIM905
    "open-mode output parsable quiet requeue signal test-only verbose wait wrap".split()
)
"""Options that a successor does not repeat: they concern one job, or hpc-grpo sets them for each job."""


def given_options(script: str, environ: Mapping[str, str], submit_line: str, command: str) -> Options:
    """Return all options given to sbatch. The command line overrides variables, and those override the script.

    `submit_line` is Slurm's: words joined by blanks, without quotes. The options end at the script of `command`.
    """
    return _merged(directives(script), from_variables(environ), _options(submit_line.split()[1:], command))


def directives(script: str) -> Options:
    """Return the options in the `#SBATCH` lines of a job script. They end at its first command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            text = line.removeprefix("#SBATCH")
            try:
                words += shlex.split(text, comments=True)
            except ValueError:  # an unpaired quote, which sbatch accepts
                words += text.split()
        elif line.strip() and not line.startswith("#"):
            break
    return _options(words)


def from_variables(environ: Mapping[str, str]) -> Options:
    return {option: environ[name] or True for name, option in _VARIABLES.items() if name in environ}


def overlaid(launch: LaunchConfig, given: Options) -> LaunchConfig:
    """Return `launch` with the given options on top."""
    given = {name: value for name, value in given.items() if name not in _OF_ONE_JOB}
    return _asking_for(launch, _merged(long_options(launch), given))


def where_silent(launch: LaunchConfig, given: Options) -> LaunchConfig:
    """Return `launch`, completed with the given options for values that it does not set."""
    said = long_options(launch)
    if "time_min" not in launch.slurm.model_fields_set:  # its default looks like a user's choice
        del said["time"]
    return _asking_for(launch, _merged(given, said))


def _merged(*sources: Options) -> Options:
    """Merge options; later sources override. A memory or GPU option drops all earlier options of that kind."""

    def kind(name: str, value: Any) -> str:
        if name in ("mem", "mem-per-cpu", "mem-per-gpu"):
            return "memory"
        is_gpu = name.startswith("gpus") or (name.startswith(("gres", "tres")) and "gpu" in str(value))
        return "gpus" if is_gpu else name

    merged: Options = {}
    for source in sources:
        kinds = {kind(name, value) for name, value in source.items()}
        merged = {name: value for name, value in merged.items() if kind(name, value) not in kinds} | source
    return merged


def _asking_for(launch: LaunchConfig, options: Options) -> LaunchConfig:
    num_nodes, extra = launch.num_nodes, {}
    values: dict[str, Any] = {"gpus_per_node": 0}
    for name, value in options.items():
        text = str(value)
        match name:
            case "nodes":
                least = text.partition("-")[0]
                num_nodes = int(least) if least.isdigit() else num_nodes
            case "time":
                limit = 0 if text.upper() in ("UNLIMITED", "INFINITE") else minutes(text)
                values["time_min"] = _NO_LIMIT_MIN if limit == 0 else limit or launch.slurm.time_min
            case "account" | "partition":
                values[name] = text
            case "cpus-per-task" if text.isdigit():
                values["cpus_per_node"] = int(text)
            case "gpus-per-node" if text.isdigit():
                values["gpus_per_node"] = int(text)
            case "gpus-per-node":  # with a type, such as gh200:4
                extra["gres"] = ",".join(f"gpu:{part}" for part in text.split(","))
            case "ntasks-per-node" if text == "1":
                continue  # the same as in our own jobs
            case _:
                extra[name.replace("-", "_")] = value
    slurm = launch.slurm.model_copy(update={**values, "extra": extra})
    return launch.model_copy(update={"num_nodes": num_nodes, "slurm": slurm})


def _options(words: Sequence[str], command: str = "") -> Options:
    """Parse options as sbatch does, up to the script of `command`, which is its absolute path with its arguments.

    The words from the script on are the end of `command`, unless a site has changed it: then the script's name counts.
    """
    found: Options = {}
    last, waits, name_of_script = "", False, Path(command.partition(" ")[0]).name
    for index, word in enumerate(words):
        if command and command.endswith(" ".join(words[index:])):
            break
        if waits:
            found[last], waits = word, False
        elif word.startswith("-") and word != "-":
            name, separator, value = word[2:].partition("=")
            if not word.startswith("--"):
                name, separator, value = word[1], word[2:], word[2:].removeprefix("=")
            last = _NAMES.get(name, name)
            found[last], waits = value if separator else True, not separator and last not in _WITHOUT_VALUE
        elif name_of_script and Path(word).name == name_of_script:
            break
        elif isinstance(begun := found.get(last), str):  # the rest of a value with blanks
            found[last] = f"{begun} {word}"
    return found
