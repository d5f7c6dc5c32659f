"""The commands about disk: show what runs take, and remove files that runs no longer need."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from hpc_grpo.cli.options import JSON, ROOT, RUNS, complete, echo, echo_json, find_runs, open_runs, say_no_runs
from hpc_grpo.run.checkpoint import remove_checkpoint
from hpc_grpo.run.lock import refuse_if_held
from hpc_grpo.run.retention import Removable, refuse_unless_newest_is_whole, removable, usage
from hpc_grpo.system.disk import room_in
from hpc_grpo.system.readable import file_size, table


@click.command()
@RUNS
@ROOT
@JSON
def du(run_names: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Show the bytes and files of runs on disk, what `clean` would free, and the free space.

    Default: all runs. The name of a sweep stands for its runs.
    """
    runs = find_runs(run_names, root)
    found = [(run, usage(run), removable(run)) for run in runs]
    if as_json:
        values = [
            {
                "run": str(run.path),
                "parts": [*map(asdict, parts)],
                "removable": sum(item.taken.num_bytes for item in items),
            }
            for run, parts, items in found
        ]
        echo_json(values)
        return
    rows = []
    for run, parts, items in found:
        note = f"clean would free {_total(items)}" if items else ""
        files = sum(part.num_files for part in parts)
        rows.append((run.name, file_size(sum(part.num_bytes for part in parts)), f"{files:,}", note))
        rows += [(f"  {part.name}", file_size(part.num_bytes), f"{part.num_files:,}", part.note) for part in parts]
    if not rows:
        say_no_runs(root)
        return
    echo(table(("RUN", "SIZE", "FILES", ""), rows))
    room = room_in(runs[0].path)
    left = "" if room.num_files is None else f", {room.num_files:,} files {room.files_limit}"
    echo(f"{file_size(room.num_bytes)} {room.limit}{left} in {runs[0].path.parent}")


@click.command()
@click.argument("run_names", nargs=-1, required=True, metavar="RUN...", shell_complete=complete("runs"))
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean(run_names: tuple[str, ...], yes: bool) -> None:
    """Remove older checkpoints and exports of runs, and incomplete saves. Refuses a run that trains.

    Lists the files and asks first. Without a terminal, removes only with --yes. Keeps the newest valid checkpoint, the
    newest export, rollouts, ledger and all records. The name of a sweep stands for its runs.
    """
    runs = open_runs(run_names)
    for run in runs:
        refuse_if_held(run)
    found = {run: removable(run) for run in runs}
    items = [item for of_run in found.values() for item in of_run]
    if not items:
        echo("There is nothing to remove.")
        return
    for item in items:
        echo(f"{file_size(item.taken.num_bytes):>10}  {item.path}  ({item.why})")
    total = _total(items)
    if not yes and not (sys.stdin.isatty() and click.confirm(f"Remove these, {total}?")):
        echo(f"Nothing was removed. --yes removes these, {total}.")
        return
    for run, of_run in found.items():
        refuse_unless_newest_is_whole(run, of_run)
        for item in of_run:
            refuse_if_held(run)  # an attempt may have started since the first check
            remove_checkpoint(item.path)
    echo(f"Removed {total}.")


def _total(items: list[Removable]) -> str:
    num_files = sum(item.taken.num_files for item in items)
    return f"{file_size(sum(item.taken.num_bytes for item in items))} in {num_files:,} files"
