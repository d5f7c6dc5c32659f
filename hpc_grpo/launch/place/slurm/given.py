"""Reads what a user gave sbatch for a job: directives of its script, SBATCH_ variables, words on its command line.

Slurm's record of a job tells what it has instead: after defaults, rounding and a site's submit plugin, under names that
nobody may ask for. A successor asks again for what was given, on top of what the config says. Pure functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.launch.place.slurm.text import minutes

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig

Options = dict[str, str | bool]
"""Options of sbatch by their long names; True: given without a value."""

VARIABLES: dict[str, str] = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GRES": "gres",
    "SBATCH_HINT": "hint",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NETWORK": "network",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}
"""sbatch's own variables that say which nodes, for how long and on whose account -> the option that each stands for."""

_KEYS = {"time_min": "time", "exclusive": "exclusive"}
"""Keys of launch.slurm whose default is a value like any other -> the option that each stands for."""

_SHORT = dict(
    pair.split("=")
    for pair in (  # noqa: SIM905
        "A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error "
        "F=nodefile G=gpus H=hold i=input J=job-name k=no-kill L=licenses M=clusters m=distribution N=nodes n=ntasks "
        "O=overcommit o=output p=partition Q=quiet q=qos S=core-spec s=oversubscribe t=time v=verbose W=wait "
        "w=nodelist x=exclude"
    ).split()
)
_ALIASES = {"tasks-per-node": "ntasks-per-node"}
_WITHOUT_VALUE = frozenset(
    "contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue overcommit oversubscribe "  # noqa: SIM905
    "parsable propagate quiet reboot requeue spread-job test-only use-min-nodes verbose wait".split()
)
"""Options whose value, if they take one, follows an equals sign."""

_OF_ONE_JOB = frozenset(
    "array begin chdir clusters deadline dependency error get-user-env hold input job-name no-kill no-requeue "  # noqa: SIM905
    "ntasks ntasks-per-node open-mode output parsable quiet requeue signal test-only verbose wait wrap".split()
)
"""Options that say how one job is handed in, or that every job of ours decides for itself."""


def given_options(script: str, environ: Mapping[str, str], submit_line: str, script_name: str) -> Options:
    """Return all that sbatch was given: the command line wins over variables, and those over the script.

    `submit_line` is Slurm's: words joined by blanks, without their quotes. `script_name` is the last part of the
    script's path, at which its options end.
    """
    merged: Options = {}
    for source in (directives(script), from_variables(environ), _options(submit_line.split()[1:], script_name)):
        if any(map(_is_memory, source)):  # sbatch takes one option for memory
            merged = {name: value for name, value in merged.items() if not _is_memory(name)}
        merged |= source
    return merged


def directives(script: str) -> Options:
    """Return the options in the `#SBATCH` lines of a job script, which end with its first command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.startswith("#"):
            break
    return _options(words)


def from_variables(environ: Mapping[str, str]) -> Options:
    return {option: environ[name] or True for name, option in VARIABLES.items() if name in environ}


def overlaid(launch: LaunchConfig, given: Options) -> LaunchConfig:
    """Return `launch` asking for what was given; GPUs or memory that were given replace all of that kind."""
    slurm, num_nodes = launch.slurm, launch.num_nodes
    given = _as_one_task(given, num_nodes)
    values: dict[str, Any] = {}
    extra = {name.replace("-", "_"): value for name, value in slurm.extra.items()}
    if any(map(_is_memory, given)):
        extra = {name: value for name, value in extra.items() if not _is_memory(name)}
    if any(_is_gpu(name, value) for name, value in given.items()):
        extra = {name: value for name, value in extra.items() if not _is_gpu(name, value)}
        values["gpus_per_node"] = 0
    for name, value in given.items():
        text = str(value)
        match name:
            case "nodes":
                least = text.partition("-")[0]
                num_nodes = int(least) if least.isdigit() else num_nodes
            case "time":
                values["time_min"] = minutes(text) or slurm.time_min
            case "account" | "partition" | "network":
                values[name] = text
                extra.pop(name, None)
            case "cpus-per-task" if text.isdigit():
                values["cpus_per_node"] = int(text)
            case "gpus-per-node" if text.isdigit():
                values["gpus_per_node"] = int(text)
            case "gpus-per-node":  # of a type, such as gh200:4
                extra["gres"] = ",".join(f"gpu:{part}" for part in text.split(","))
            case "exclusive" if value is True:
                values["exclusive"] = True
                extra.pop(name, None)
            case _ if name not in _OF_ONE_JOB:
                extra[name.replace("-", "_")] = value
    changed = slurm.model_copy(update={**values, "extra": extra})
    return launch.model_copy(update={"num_nodes": num_nodes, "slurm": changed})


def where_silent(launch: LaunchConfig, given: Options) -> LaunchConfig:
    """Return `launch` overlaid with those options about which it says nothing itself."""
    slurm = launch.slurm
    said = {name.replace("_", "-") for name in slurm.extra}
    said |= {name for name in ("account", "partition", "network") if getattr(slurm, name) is not None}
    said |= {option for key, option in _KEYS.items() if key in slurm.model_fields_set}
    says_memory = any(map(_is_memory, said))
    says_gpus = slurm.gpus_per_node > 0 or any(_is_gpu(name, value) for name, value in slurm.extra.items())
    open_ones = {
        name: value
        for name, value in given.items()
        if name not in said and not (says_memory and _is_memory(name)) and not (says_gpus and _is_gpu(name, value))
    }
    return overlaid(launch, open_ones)


def _as_one_task(given: Options, num_nodes: int) -> Options:
    """Return `given` with what it asks for by task asked for by node: our jobs have one task a node, with all of it."""
    num_tasks = _tasks_per_node(given, num_nodes)
    if num_tasks < 2:
        return given
    changed = dict(given)
    if "cpus-per-gpu" not in given:
        changed["cpus-per-task"] = str(num_tasks * _number(given.get("cpus-per-task"), 1))
    if isinstance(gpus := changed.pop("gpus-per-task", None), str):
        kind, separator, number = gpus.rpartition(":")
        changed["gpus-per-node"] = f"{kind}{separator}{num_tasks * _number(number, 1)}"
    return changed


def _tasks_per_node(given: Options, num_nodes: int) -> int:
    if by_node := _number(given.get("ntasks-per-node"), 0):
        return by_node
    return -(-_number(given.get("ntasks"), 1) // _number(given.get("nodes"), num_nodes))


def _number(value: str | bool | None, otherwise: int) -> int:
    return int(value) if isinstance(value, str) and value.isdigit() and int(value) else otherwise


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a lone quote, which sbatch takes as it is
        return text.split()


def _options(words: Iterable[str], script_name: str = "") -> Options:
    """Read options as sbatch does, up to the script's own path where one is named."""
    found: Options = {}
    last, waits = "", False
    for word in words:
        if waits:
            found[last], waits = word, False
        elif word.startswith("-") and word != "-":
            last, value = _split(word)
            waits = value is True and last not in _WITHOUT_VALUE
            found[last] = value
        elif script_name and Path(word).name == script_name:
            break
        elif isinstance(begun := found.get(last), str):  # a value with blanks
            found[last] = f"{begun} {word}"
    return found


def _split(word: str) -> tuple[str, str | bool]:
    """Split a word into the long name of its option and its value; True where it holds none."""
    if word.startswith("--"):
        name, separator, value = word[2:].partition("=")
        return _ALIASES.get(name, name), value if separator else True
    return _SHORT.get(word[1], word[1]), word[2:].removeprefix("=") or True


def _is_memory(name: str) -> bool:
    return name in ("mem", "mem-per-cpu", "mem-per-gpu", "mem_per_cpu", "mem_per_gpu")


def _is_gpu(name: str, value: Any) -> bool:
    return name.startswith("gpus") or (name.startswith(("gres", "tres")) and "gpu" in str(value))
