"""Seeing where runs stand: from their directories alone, so that nobody polls the scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_grpo.cli.run_argument import ROOT_VARIABLE, find_run, runs_below, runs_root

if TYPE_CHECKING:
    from hpc_grpo.report.records import RunRecords
    from hpc_grpo.report.summary import RunSummary
    from hpc_grpo.run.paths import RunDir

_RUN = click.argument("run_name", metavar="RUN")
_ROOT = click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Folder with the runs; default: ${ROOT_VARIABLE} or ./runs.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON list, null where a value is unknown.")


@click.command()
@click.argument("run_names", nargs=-1, metavar="[RUN]...")
@_ROOT
@_JSON
@click.option("--slurm", "asks_slurm", is_flag=True, help="Ask the scheduler too: once, and at most once a minute.")
def status(run_names: tuple[str, ...], root: Path | None, as_json: bool, asks_slurm: bool) -> None:
    """Say where runs stand: all of them, or those named. Asks the scheduler only with --slurm."""
    from hpc_grpo.report import views

    runs = [find_run(name, root) for name in run_names] if run_names else runs_below(root or runs_root())
    if asks_slurm and (runs or as_json):
        click.echo(_with_queue(runs, as_json))
        return
    summaries = _summaries(runs)
    if as_json:
        click.echo(views.as_json(summaries))
    elif _told_there_are_some(runs, root):
        click.echo(views.status_table(summaries, _terminal_width()))


@click.command("list")
@_ROOT
@_JSON
def list_runs(root: Path | None, as_json: bool) -> None:
    """List the runs: name, when they were created, state."""
    from hpc_grpo.report import views

    runs = runs_below(root or runs_root())
    summaries = _summaries(runs)
    if as_json:
        click.echo(views.as_json(summaries))
    elif _told_there_are_some(runs, root):
        click.echo(views.list_table(summaries))


@click.command()
@_RUN
def watch(run_name: str) -> None:
    """Show a run's status and last steps, anew every 2 seconds, until it is over or Ctrl+C."""
    from hpc_grpo.report.watching import watch_live, watch_plainly

    run = find_run(run_name)
    try:
        if not sys.stdout.isatty():
            for line in watch_plainly(run):
                click.echo(line)
            return
        from rich.console import Console

        watch_live(run, Console())
    except KeyboardInterrupt:
        return


@click.command()
@_RUN
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on as it grows, into the next attempts.")
@click.option("--node", metavar="NAME", help="The logs of a node instead of the driver's.")
@click.option("--attempt", type=click.IntRange(1), metavar="K", help="Default: the newest.")
@click.option("--lines", type=click.IntRange(0), default=50, show_default=True, metavar="N", help="So many at the end.")
def logs(run_name: str, follows: bool, node: str | None, attempt: int | None, lines: int) -> None:
    """Print the end of the driver's log, or of a node's."""
    from hpc_grpo.report.following import LogFollower, follow
    from hpc_grpo.report.logs import attempt_dir

    run = find_run(run_name)
    folder = attempt_dir(run, attempt)
    if folder is None:
        click.echo(_nothing_started(run), err=True)
    if not follows:
        if folder is not None:
            _print_logs(folder, node, lines)
        return
    try:
        for text in follow(LogFollower(run, node=node, attempt=attempt, num_lines=lines)):
            click.echo(text, nl=False)
    except KeyboardInterrupt:
        return


@click.command()
@_RUN
def explain(run_name: str) -> None:
    """Say what became of every attempt of a run, and what to do about it."""
    from hpc_grpo.report import explain as explanation

    run = find_run(run_name)
    records, now = _records(run)
    for entry in explanation.explain(records, now):
        click.echo(f"{explanation.as_text(entry)}\n")
    unrecorded = explanation.unrecorded_attempts(records)
    for path in unrecorded:
        click.echo(f"{path.relative_to(run.path)}: its attempt.json is missing or damaged. Was the disk full?\n")
    if not records.attempts and not unrecorded:
        click.echo(_nothing_started(run))
    if records.chain.ended:
        click.echo(f"No further job of its chain: {records.chain.ended}")
    summary = _summaries([run])[0]
    click.echo(f"{summary.run} is now: {summary.state}")


def _records(run: RunDir) -> tuple[RunRecords, float]:
    import time

    from hpc_grpo.report.records import read_records

    return read_records(run), time.time()


def _summaries(runs: list[RunDir]) -> list[RunSummary]:
    from hpc_grpo.report.summary import summarize

    return [summarize(*_records(run)) for run in runs]


def _with_queue(runs: list[RunDir], as_json: bool) -> str:
    """The status of runs with what Slurm says about their jobs."""
    import time

    from hpc_grpo.errors import LaunchError
    from hpc_grpo.report import queue, views
    from hpc_grpo.report.words import duration

    records = [_records(run)[0] for run in runs]
    try:
        answer = queue.ask_about(records)
    except LaunchError as error:
        click.echo(f"Without Slurm's word: {error}", err=True)
        return views.as_json(_summaries(runs)) if as_json else views.status_table(_summaries(runs), _terminal_width())
    told = [queue.told_of(one, answer) for one in records]
    summaries = [queue.with_problem(summary, jobs) for summary, jobs in zip(_summaries(runs), told, strict=True)]
    if as_json:
        return views.as_json(summaries, [queue.as_values(jobs, answer) for jobs in told])
    table = views.status_table(summaries, _terminal_width(), [queue.in_words(jobs) for jobs in told])
    when = f"Slurm was asked {duration(time.time() - answer.asked_at)} ago." if answer.asked else "No job to ask about."
    return f"{table}\n{when}"


def _told_there_are_some(runs: list[RunDir], root: Path | None) -> bool:
    if not runs:
        looked = (root or runs_root()).absolute()
        click.echo(f"No runs below {looked}. Name another folder with --root or {ROOT_VARIABLE}.", err=True)
    return bool(runs)


def _terminal_width() -> int | None:
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def _nothing_started(run: RunDir) -> str:
    from hpc_grpo.report.logs import slurm_output

    records = _records(run)[0]
    link = records.unstarted_link
    text = f"No attempt of run {run.path.name} has started yet."
    if link is None:
        return text
    return f"{text} Slurm's output of job {link.job_id}: {slurm_output(run, records.chain, link.job_id)}"


def _print_logs(folder: Path, node: str | None, num_lines: int) -> None:
    from hpc_grpo.report.logs import is_of_an_actor, log_files, ray_logs, tail

    kept = ray_logs(folder, node) if node is not None else []
    for path in [*log_files(folder, node), *filter(is_of_an_actor, kept)]:
        if node is not None:
            click.echo(f"==> {path} <==")
        if not path.exists():
            hint = "" if node else " --node NAME shows a node's logs."
            click.echo(f"{path} is not there (yet).{hint}", err=True)
        click.echo(tail(path, num_lines), nl=False)
    if kept:
        click.echo("All of Ray's logs of the node:")
        for path in kept:
            click.echo(f"{path.stat().st_size:>12,} bytes  {path}")


COMMANDS = (status, list_runs, watch, logs, explain)
