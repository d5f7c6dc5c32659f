"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import printable

RUNS_ROOT_VARIABLE = "HPC_GRPO_RUNS_ROOT"
_DEFAULT_ROOT = Path("runs")

RUN = click.argument("run_name", metavar="RUN")
CONFIG = click.argument("config_name", metavar="CONFIG")
OPTIONAL_CONFIG = click.argument("optional_config", metavar="[CONFIG]", required=False)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
SET = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the config, such as train.lr=1e-6."
)
ACCEPT_CHANGES = click.option(
    "--accept-changes",
    "accepts_changes",
    is_flag=True,
    help="Go on although data, tokenizer, rewards or package have changed since the start, and record that.",
)
DRIVER = click.option("--driver", hidden=True, default=DEFAULT_DRIVER, help="Module or .py file; for tests.")


def slurm_time(value: str) -> int:
    """Read a --time option, a walltime in one of Slurm's formats, in minutes. Raises ConfigError."""
    from hpc_grpo.launch.place.slurm.text import minutes

    if time_min := minutes(value):
        return time_min
    raise ConfigError(
        f"--time = {value!r} must be a time in one of Slurm's formats, and more than 0: 90 (minutes), 90:00, 24:00:00, "
        f"1-12 (days-hours), 1-12:30 or 1-12:30:00."
    )


def slurm_overrides(options: Mapping[str, Any]) -> list[str]:
    """Return the options given to a command as overrides of the config. Raises UsageError where two contradict."""
    if options.get("chain") is not None and options.get("until_complete"):
        raise click.UsageError(
            "--chain N and --until-complete each say how many follow-on jobs there may be: give one."
        )
    keys = {
        "name": "run.name",
        "nodes": "launch.num_nodes",
        "time": "launch.slurm.time_min",
        "partition": "launch.slurm.partition",
        "account": "launch.slurm.account",
        "gpus_per_node": "launch.slurm.gpus_per_node",
        "cpus_per_node": "launch.slurm.cpus_per_node",
        "chain": "launch.slurm.max_job_chains",
    }
    overrides = [f"{key}={json.dumps(options[name])}" for name, key in keys.items() if options.get(name) is not None]
    for pair in options.get("sbatch", ()):
        key, separator, value = pair.partition("=")
        overrides.append(f"launch.slurm.extra.{key.replace('-', '_')}={json.dumps(value if separator else True)}")
    if options.get("setup"):
        overrides.append(f"launch.setup_lines+={json.dumps(list(options['setup']))}")
    if options.get("until_complete"):
        overrides.append("launch.slurm.max_job_chains=null")
    return overrides


def find_run(argument: str, root: Path | None = None) -> RunDir:
    """Return the run that RUN names, to look at it: a run directory, or a name below the runs root.

    A folder that is a run wins over a name. Names are looked up below `root`; without it below $HPC_GRPO_RUNS_ROOT,
    then below ./runs. Raises ConfigError with near matches.
    """
    roots = [root] if root is not None else _roots()
    for path in (Path(argument).expanduser(), *(folder / argument for folder in roots)):
        if _is_run(path):
            return RunDir(path.absolute())
    raise ConfigError(_no_such_run(argument, roots))


def open_run(argument: str) -> RunDir:
    """Return the run that RUN names, for a command that acts on it. Raises ConfigError where others may write it."""
    run = find_run(argument)
    refuse_shared(run.path)
    return run


def runs_root() -> Path:
    """Return the folder whose runs are listed: $HPC_GRPO_RUNS_ROOT, else ./runs."""
    return _roots()[0]


def runs_below(root: Path) -> list[RunDir]:
    """Return the runs directly below `root`, by name; none if there is no such folder."""
    if not root.is_dir():
        return []
    return [RunDir(path.absolute()) for path in sorted(root.iterdir()) if _is_run(path)]


def echo(text: Any, err: bool = False, nl: bool = True) -> None:
    """Print for the user, whoever wrote the text. Every command prints through here."""
    click.echo(printable(str(text), longest_line=None), err=err, nl=nl)


def _roots() -> list[Path]:
    named = os.environ.get(RUNS_ROOT_VARIABLE)
    return [Path(named).expanduser(), _DEFAULT_ROOT] if named else [_DEFAULT_ROOT]


def _is_run(path: Path) -> bool:
    try:
        return RunDir(path).has_config()
    except OSError:  # somebody else's folder, or no name at all
        return False


def _no_such_run(argument: str, roots: Sequence[Path]) -> str:
    looked = " or ".join(f"{root.absolute()}" for root in roots)
    nearest = ", ".join(repr(name) for name in _nearest(argument, roots))
    hint = f" Did you mean {nearest}?" if nearest else ""
    return (
        f"RUN = {argument!r} must be a run directory (a folder with config.yaml) or the name of a run below {looked}."
        f"{hint} `hpc-grpo list --root FOLDER` shows the runs of a folder; {RUNS_ROOT_VARIABLE} names the "
        f"one to look in."
    )


def _nearest(argument: str, roots: Sequence[Path]) -> Iterator[str]:
    import difflib

    names = {run.path.name for root in roots for run in runs_below(root)}
    yield from difflib.get_close_matches(Path(argument).name, sorted(names), n=3)
