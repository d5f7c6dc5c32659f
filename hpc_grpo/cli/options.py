"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import RunDir, is_sweep
from hpc_grpo.system.readable import counted, for_json, printable

RUNS_ROOT_VARIABLE = "HPC_GRPO_RUNS_ROOT"
_DEFAULT_ROOT = Path("runs")
_DEMO_ROOT = Path("demo/runs")


def complete(*kinds: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the completion function of an argument. `kinds` are runs, configs, keys."""

    def found(context: click.Context, parameter: click.Parameter, text: str) -> list[CompletionItem]:
        from hpc_grpo.cli.completion import candidates

        before, others = context.params.get(str(parameter.name)), [kind for kind in kinds if kind != "keys"]
        if "=" in text or (isinstance(before, tuple) and before[-1:] == ("=",)):
            return []  # the text is a value; bash splits KEY=V into 3 words
        keys_only = "keys" in kinds and (before or not others)  # keys follow a config
        return candidates(["keys"] if keys_only else others, text)

    return found


def together(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator for several, in their order."""
    return lambda command: functools.reduce(lambda wrapped, each: each(wrapped), reversed(decorators), command)


def _after_sets(command: Callable[..., Any]) -> Callable[..., Any]:
    """Put the values of --set before the overrides of a command."""

    @functools.wraps(command)
    def merged(*args: Any, sets: tuple[str, ...], overrides: tuple[str, ...], **others: Any) -> Any:
        return command(*args, overrides=(*sets, *overrides), **others)

    return merged


RUN = click.argument("run_name", metavar="RUN", shell_complete=complete("runs"))
RUNS = click.argument("run_names", nargs=-1, metavar="[RUN]...", shell_complete=complete("runs"))
CONFIG = click.argument("config_name", metavar="CONFIG", shell_complete=complete("configs"))
CONFIG_OR_RUN = click.argument("config_name", metavar="CONFIG|RUN", shell_complete=complete("configs", "runs"))
SET = click.option("--set", "sets", multiple=True, hidden=True, help="The old form of KEY=VALUE.")
OVERRIDES = together(
    click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete("keys")), SET, _after_sets
)
ROOT = click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Folder with the runs; default: ${RUNS_ROOT_VARIABLE} or ./runs.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, with null for unknown values.")
DRIVER = click.option("--driver", hidden=True, default=DEFAULT_DRIVER, help="Module or .py file; for tests.")
STARTS_RUN = together(
    click.option(
        "--accept-changes", "accepts_changes", is_flag=True,
        help="Continue although data, tokenizer, rewards or package have changed since the start. Records the changes.",
    ),
    DRIVER,
)  # fmt: skip


class PlainGroup(click.Group):
    """Show the first sentence of each command's help, and never cut it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(500)) for name, found in commands if found is not None])


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
    """Return the options given to a command as overrides of the config. Raises UsageError if two contradict."""
    chains = [options.get("chain") is not None, options.get("one_job"), options.get("until_complete")]
    if sum(map(bool, chains)) > 1:
        raise click.UsageError("--chain N, --one-job and --until-complete contradict each other: give one.")
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
        key = key.lstrip("-").replace("-", "_")
        overrides.append(f"launch.slurm.extra.{key}={json.dumps(value if separator else True)}")
    if options.get("setup"):
        overrides.append(f"launch.setup_lines+={json.dumps(list(options['setup']))}")
    if options.get("one_job"):
        overrides.append("launch.slurm.max_job_chains=0")
    if options.get("until_complete"):
        echo("--until-complete is the default now. The next release removes the option.", err=True)
        overrides.append("launch.slurm.max_job_chains=null")
    return overrides


def find_run(argument: str, root: Path | None = None) -> RunDir:
    """Return the run that RUN names, for a command that only reads it: a run directory, or a name below the runs root.

    A folder that is a run wins over a name. Names are looked up below `root`; without it below $HPC_GRPO_RUNS_ROOT,
    then below ./runs. Raises ConfigError with near matches.
    """
    roots = _roots(root)
    for path in (Path(os.path.expanduser(argument)), *(folder / argument for folder in roots)):
        if _is_run(path):
            return RunDir(path.absolute())
    if runs := find_sweep(argument, root):
        first = runs[0].path
        raise ConfigError(f"RUN = {argument!r}: {first.parent} is a sweep of {len(runs)} runs. Name one: {first}")
    raise ConfigError(_no_such_run(argument, roots))


def find_runs(names: Sequence[str], root: Path | None = None) -> list[RunDir]:
    """Return the runs that `names` name, each once. Without names, return the runs below `root` or the default folder.

    The name of a sweep stands for its runs. Raises ConfigError like `find_run`.
    """
    if not names:
        return runs_below(root or runs_root())
    return list(dict.fromkeys(run for name in names for run in find_sweep(name, root) or [find_run(name, root)]))


def find_sweep(argument: str, root: Path | None = None) -> list[RunDir]:
    """Return the runs of a sweep: a folder, or a name below the runs root. Empty if `argument` names no sweep."""
    for folder in (Path(os.path.expanduser(argument)), *(each / argument for each in _roots(root))):
        if _is_sweep(folder) and (runs := runs_below(folder)):
            return runs
    return []


def run_unless_config(argument: str) -> RunDir | None:
    """Return the run that CONFIG|RUN names, None for a config. Raises ConfigError if it is neither."""
    from hpc_grpo.config.load import find_config

    try:
        find_config(argument)
    except ConfigError as error:
        try:
            return find_run(argument)
        except ConfigError as no_run:
            is_pair = "=" in argument.partition("/")[0]
            if is_pair or argument.endswith((".yaml", ".yml", ".sh")) or Path(argument).is_file():
                raise error from None
            raise ConfigError(f"{error}\nNor is it a run: {no_run}") from None
    return None


def open_run(argument: str) -> RunDir:
    """Return the run that RUN names, for a command that changes it. Raises ConfigError if others may write to it."""
    run = find_run(argument)
    refuse_shared(run.path)
    return run


def open_runs(names: Sequence[str]) -> list[RunDir]:
    """Return the runs that `names` name, to change them. Raises ConfigError like `open_run`, or for a read-only run."""
    runs = find_runs(names)
    for run in runs:
        refuse_shared(run.path)
        run.refuse_read_only()
    return runs


def runs_root() -> Path:
    """Return the folder whose runs are listed: $HPC_GRPO_RUNS_ROOT, else ./runs."""
    return _roots()[0]


def all_runs() -> list[RunDir]:
    """Return the runs that commands find by name."""
    return [run for root in _roots() for run in runs_below(root)]


def runs_below(root: Path) -> list[RunDir]:
    """Return the runs directly below `root`, and the runs of sweeps there; none if there is no such folder."""
    folders = (_entries(path) if _is_sweep(path) else [path] for path in _entries(root))
    return [RunDir(path.absolute()) for paths in folders for path in paths if _is_run(path)]


def say_no_runs(root: Path | None) -> None:
    """Print that `root`, or the default folder, has no runs. If the demo has runs, print where they are."""
    looked = (root or runs_root()).absolute()
    echo(f"No runs below {looked}.{_of_the_demo()} Name another folder with --root or {RUNS_ROOT_VARIABLE}.", err=True)


def _of_the_demo() -> str:
    runs = runs_below(_DEMO_ROOT)
    return f" {_DEMO_ROOT} has {counted(len(runs), 'run')}: hpc-grpo status --root {_DEMO_ROOT}." if runs else ""


def echo(text: Any, err: bool = False, nl: bool = True) -> None:
    """Print text for the user, without control characters. Every command prints through this function."""
    click.echo(printable(str(text), longest_line=None), err=err, nl=nl)


def echo_json(facts: Any) -> None:
    """Print facts as JSON. Numbers that are not finite become null, unknown types become text."""
    echo(json.dumps(for_json(facts), indent=2, allow_nan=False, default=str))


def show(facts: Any, text: object, as_json: bool) -> None:
    """Print `facts` as JSON, or `text`."""
    if as_json:
        echo_json(facts)
    else:
        echo(str(text).removesuffix("\n"))


def _roots(root: Path | None = None) -> list[Path]:
    if root is not None:
        return [root]
    named = os.environ.get(RUNS_ROOT_VARIABLE)
    return [Path(os.path.expanduser(named)), _DEFAULT_ROOT] if named else [_DEFAULT_ROOT]


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):  # no folder, or another user's
        return sorted(folder.iterdir())
    return []


def _is_sweep(path: Path) -> bool:
    with suppress(OSError, ValueError):  # another user's folder, or an invalid name
        return is_sweep(path)
    return False


def _is_run(path: Path) -> bool:
    with suppress(OSError):  # another user's folder, or an invalid name
        return RunDir(path).has_config()
    return False


def _no_such_run(argument: str, roots: Sequence[Path]) -> str:
    if Path(argument).suffix in (".yaml", ".yml", ".sh") and Path(argument).is_file():
        return (
            f"RUN = {argument!r} is a config, but this command needs its run: run.root/run.name, such as runs/my-run."
        )
    looked = " or ".join(f"{root.absolute()}" for root in roots)
    names = {run.path.name: run.name for root in roots for run in runs_below(root)}
    names |= {name.partition("/")[0]: name.partition("/")[0] for name in names.values()}
    close = get_close_matches(Path(argument).name, sorted(names), n=3)
    hint = f" Did you mean {', '.join(repr(names[near]) for near in close)}?" if close else ""
    return (
        f"RUN = {argument!r} must be a run directory (a folder with config.yaml) or the name of a run below {looked}."
        f"{hint}{_of_the_demo()} `hpc-grpo status --root FOLDER` shows the runs of a folder. {RUNS_ROOT_VARIABLE} "
        f"names the folder to look in."
    )
