"""The commands that show runs. They read run directories; only `status --slurm` asks the scheduler."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.options import (
    JSON,
    ROOT,
    RUN,
    RUNS,
    complete,
    echo,
    echo_json,
    find_run,
    find_runs,
    find_sweep,
    runs_below,
    runs_root,
    say_no_runs,
    show,
)
from hpc_grpo.errors import LaunchError
from hpc_grpo.report.logs import attempt_dir, follow, is_of_an_actor, log_files, ray_logs, tail, why_no_attempt
from hpc_grpo.report.status import read_records, status_table, summarize
from hpc_grpo.report.watch import watch_plainly
from hpc_grpo.system.say import undrawn


@click.command()
@RUNS
@ROOT
@JSON
@click.option("--why", is_flag=True, help="Explain the end of every attempt of RUN, and what to do.")
@click.option("--slurm", "asks_slurm", is_flag=True, help="Also ask the scheduler, at most once a minute.")
def status(run_names: tuple[str, ...], root: Path | None, as_json: bool, why: bool, asks_slurm: bool) -> None:
    """Show the state of runs. Default: all runs. The name of a sweep stands for its runs.

    Asks the scheduler only with --slurm.
    """
    if why and (asks_slurm or not run_names):
        raise click.UsageError("--why needs a RUN, and does not work with --slurm.")
    runs = find_runs(run_names, root)
    if why:
        from hpc_grpo.report.explain import explained, explained_facts

        if as_json:
            echo_json([explained_facts(run) for run in runs])
        else:
            echo("\n".join(paragraph for run in runs for paragraph in explained(run)))
        return
    records = [read_records(run) for run in runs]
    summaries = [summarize(each, time.time()) for each in records]
    queue = None
    if asks_slurm and (runs or as_json):
        from hpc_grpo.report.queue import ask_about

        try:
            queue = ask_about(records)
            summaries = queue.corrected(summaries)
        except LaunchError as error:
            echo(f"Shown without the scheduler's answer: {error}", err=True)
    if as_json:
        entries = [asdict(summary) for summary in summaries]
        if queue is not None:
            for entry, jobs in zip(entries, queue.values(), strict=True):
                entry["slurm"] = jobs
        echo_json(entries)
        return
    if not runs:
        say_no_runs(root)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    echo(status_table(summaries, width, queue.cells() if queue else None))
    if queue is not None:
        echo(queue.age(time.time()))


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete("runs"))
@ROOT
def watch(run_name: str | None, root: Path | None) -> None:
    """Show a run live, or all runs: phase, progress, curves, completions. In a pipe: prints a line for each step.

    The name of a sweep stands for its runs.

    Keys: Enter opens a run, left and right go to the next one, l shows its log, r all runs, q ends.
    """
    named = find_runs([run_name], root) if run_name else []
    run = named[0] if len(named) == 1 else None
    if sys.stdout.isatty():
        from hpc_grpo.report.screen import WatchApp

        folder = named[0].path.parent if named else root or runs_root()
        WatchApp(lambda: runs_below(folder), run).run()
        return
    if run is None:
        raise click.UsageError("In a pipe, watch needs one RUN; `hpc-grpo status` prints all runs.")
    with suppress(KeyboardInterrupt):
        for line in watch_plainly(run):
            echo(line)


@click.command()
@RUN
@click.option("-f", "--follow", "follows", is_flag=True, help="Follow the log, also in later attempts.")
@click.option("--node", metavar="NAME", help="The logs of a node instead of the driver's.")
@click.option("--attempt", type=click.IntRange(1), metavar="K", help="Number of the attempt. Default: the newest.")
@click.option(
    "--num",
    "num_lines",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    metavar="N",
    help="Number of last lines.",
)
def logs(run_name: str, follows: bool, node: str | None, attempt: int | None, num_lines: int) -> None:
    """Print the end of the driver's log, or of a node's."""
    run = find_run(run_name)
    folder = attempt_dir(run, attempt)
    if folder is None:
        echo(why_no_attempt(read_records(run)), err=True)
    if follows:
        with suppress(KeyboardInterrupt):
            for text in follow(run, node=node, attempt=attempt, num_lines=num_lines):
                echo(undrawn(text), nl=False)
    elif folder is not None:
        kept = ray_logs(folder, node) if node is not None else []
        for path in [*log_files(folder, node), *filter(is_of_an_actor, kept)]:
            if node is not None:
                echo(f"==> {path} <==")
            if not path.exists():
                hint = "" if node else " --node NAME shows a node's logs."
                echo(f"{path} is not there (yet).{hint}", err=True)
            echo(undrawn(tail(path, num_lines)), nl=False)
        if kept:
            echo("All of Ray's logs of the node:")
            for path in kept:
                echo(f"{path.stat().st_size:>12,} bytes  {path}")


@click.command("report")
@click.argument("run_names", nargs=-1, required=True, metavar="RUN...", shell_complete=complete("runs"))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The page. Default: report.html in the first run."
)
def report(run_names: tuple[str, ...], out: Path | None) -> None:
    """Show what runs have learned, in the terminal and as one HTML page. The page needs no network.

    The name of a sweep stands for its runs.
    """
    from hpc_grpo.report.page import write_page
    from hpc_grpo.report.terminal import print_report

    runs = find_runs(run_names)
    for run in runs:
        print_report(run)
    echo(f"Page: {write_page(runs, out or runs[0].path / 'report.html')}")


@click.command()
@ROOT
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Default: a port derived from the user, or the next free one."
)
def dashboard(root: Path | None, port: int | None) -> None:
    """Show all runs of a folder in the browser, live, until Ctrl+C. Listens on this machine only."""
    from hpc_grpo.report.dashboard import Dashboard, ssh_line

    folder = root or runs_root()
    server = Dashboard(lambda: runs_below(folder), port)
    if line := ssh_line(server.server_port, os.environ):
        echo(f"On your own machine:  {line}")
    echo(f"Open in a browser:    {server.url}")
    with suppress(KeyboardInterrupt):
        server.serve_forever()


@click.command()
@RUNS
@JSON
def compare(run_names: tuple[str, ...], as_json: bool) -> None:
    """Compare runs with the first: config, last numbers, and newest evals prompt by prompt, with 95% intervals.

    With the folder of a sweep: shows the results of each cell, over its seeds.
    """
    from hpc_grpo.report.compare import compare_runs, sweep_results

    runs = find_sweep(run_names[0]) if len(run_names) == 1 else []
    found: Any = sweep_results(runs) if runs else compare_runs([find_run(name) for name in run_names])
    show(asdict(found), found, as_json)
