"""The commands to call before a run: what its config means, what it needs, what would go wrong on this cluster."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.foreign import foreign_options, translated
from hpc_grpo.cli.options import CONFIG, OPTIONAL_CONFIG, OVERRIDES, SET, echo
from hpc_grpo.cli.request import load_request
from hpc_grpo.config import LaunchConfig, to_yaml
from hpc_grpo.config.describe import describe
from hpc_grpo.config.resources import expects_gpus
from hpc_grpo.engine.vllm import ENVIRONMENT
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.launch.environment import environment_report
from hpc_grpo.launch.environment import report_text as variables_text
from hpc_grpo.launch.place import job_queue
from hpc_grpo.plan.disk import read_disk
from hpc_grpo.plan.fit import Plan, plan_of
from hpc_grpo.plan.memory import GH200, HARDWARE, hardware_named
from hpc_grpo.plan.model import FAMILY
from hpc_grpo.plan.text import size_sections
from hpc_grpo.preflight.diagnosis import diagnose, diagnose_in_job
from hpc_grpo.preflight.findings import Context, has_failure, report_text, to_json
from hpc_grpo.preflight.prefetch import prefetch as fill_caches
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.simulate.measured import newest_attempt
from hpc_grpo.simulate.text import time_sections
from hpc_grpo.system.gpus import ask_nvidia_smi, parse_gpus
from hpc_grpo.system.readable import file_size
from hpc_grpo.types import GIB

_GIB = click.FloatRange(0, min_open=True)
_NAME_COLUMNS = 48


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", type=click.UNPROCESSED)
@SET
@click.option("--yaml", "as_yaml", is_flag=True, help="Print only the resolved YAML.")
@foreign_options
def config(words: tuple[str, ...], sets: tuple[str, ...], as_yaml: bool, **foreign: Any) -> None:
    """Print every key of a config: its value, its default and what it means.

    With --from-…, write the config of another system as one of ours: YAML on stdout, what became of each key on
    stderr. Words are that system's then, --set changes the result, and what cannot be honoured ends with 78.
    """
    if translated(words, sets, foreign):
        return
    if unknown := [word for word in words if word.startswith("-")]:
        raise click.NoSuchOption(unknown[0])
    if not words:
        raise click.UsageError("Missing argument 'CONFIG'.")
    request = load_request(words[0], [*sets, *words[1:]])
    request.tell()
    resolved = request.config
    echo(to_yaml(resolved) if as_yaml else describe(resolved), nl=False)


@click.command()
@CONFIG
@OVERRIDES
@SET
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Default: launch.num_nodes.")
@click.option("--size", type=click.Choice(list(FAMILY)), help="Plan with this shape of Qwen2.5, not with model.path.")
@click.option(
    "--hardware",
    type=click.Choice(list(HARDWARE)),
    help="h100-* and a100: of 80 GB. Default: this machine's GPUs, else gh200.",
)
@click.option("--gpu-memory-gib", type=_GIB, metavar="GIB", help="Memory of one GPU. Default: that of --hardware.")
@click.option("--host-memory-gib", type=_GIB, metavar="GIB", help="Memory of a node. Default: that of --hardware.")
def plan(
    config_name: str,
    overrides: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: int | None,
    size: str | None,
    hardware: str | None,
    gpu_memory_gib: float | None,
    host_memory_gib: float | None,
) -> None:
    """Add up memory, disk and time of a run before it starts: what fits, what to change, which placement is fastest.

    Ends with 78 when the run does not fit its nodes; room on disk is judged by submit. Loads no model.
    """
    request = load_request(config_name, [*sets, *overrides])
    node = HARDWARE[hardware] if hardware else GH200
    if hardware is None and (gpus := parse_gpus(ask_nvidia_smi().text)) and (found := hardware_named(gpus[0].name)):
        echo(f"GPUs of this machine: {gpus[0].name} (--hardware {found})", err=True)
        node = HARDWARE[found]
    elif hardware is None and gpu_memory_gib is None and expects_gpus(request.config):
        echo("No known GPU on this machine: planned for gh200, of 96 GiB. --hardware h100-sxm: of 80.", err=True)
    sizes = {"gpu_bytes": gpu_memory_gib, "host_bytes": host_memory_gib}
    node = replace(node, **{name: int(gib * GIB) for name, gib in sizes.items() if gib is not None})
    planned = plan_of(request.config, request.environ, node, nodes=nodes, size=size)
    echo(plan_text(planned), nl=False)
    if not planned.fits:
        sys.exit(EXIT_CONFIG)


def plan_text(plan: Plan) -> str:
    measured = newest_attempt(RunDir(plan.config.run_path), plan.config)
    sections = [*size_sections(plan, read_disk(plan)), *time_sections(plan, measured)]
    return "\n\n".join(filter(None, sections)) + "\n"


@click.command()
@OPTIONAL_CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list; secrets are masked there too.")
def env(optional_config: str | None, as_json: bool) -> None:
    """Show which environment variables reach Ray and the actors, and why the others do not.

    With CONFIG, its launch.env and launch.pass_env count too. Values of secrets are never shown.
    """
    request = load_request(optional_config, []) if optional_config else None
    launch = request.config.launch if request else LaunchConfig()
    variables = environment_report(request.environ if request else os.environ, launch, ENVIRONMENT)
    if as_json:
        echo(json.dumps([asdict(variable) for variable in variables], indent=2))
    else:
        echo(variables_text(variables), nl=False)


@click.command()
@OPTIONAL_CONFIG
@OVERRIDES
@SET
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Examine N nodes; on a login node in a short job.")
@click.option(
    "--wait-min",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="MIN",
    help="Wait so long for the job of --nodes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of findings.")
@click.option("--result", type=click.Path(path_type=Path), hidden=True, help="In the job of --nodes: where to write.")
def doctor(
    optional_config: str | None,
    overrides: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: int | None,
    wait_min: float,
    as_json: bool,
    result: Path | None,
) -> None:
    """Check config, Slurm, nodes, network and GPUs before a run; each failure names its fix.

    On a login node it checks what can be seen from there, with --nodes N also N compute nodes, in a job of at most
    5 minutes. In an allocation it examines its nodes. Ends with 78 where a check failed.
    """
    if sets and optional_config is None:
        raise ConfigError("--set changes a key of CONFIG: name one, such as local/tiny_grpo.")
    begun = time.monotonic()
    context = _context(optional_config, [*sets, *overrides])
    if result is not None:
        groups = diagnose_in_job(context)
        write_atomic(result, to_json(groups))
    else:
        groups = diagnose(context, nodes, wait_min, tell=lambda text: echo(text, err=True))
    took_s = time.monotonic() - begun
    echo(to_json(groups) if as_json else report_text(groups, took_s), nl=as_json)
    if has_failure(groups):
        sys.exit(EXIT_CONFIG)


@click.command()
@CONFIG
@OVERRIDES
@SET
@click.option("--verify-only", is_flag=True, help="Fetch nothing; say whether the job would find everything.")
def prefetch(config_name: str, overrides: tuple[str, ...], sets: tuple[str, ...], verify_only: bool) -> None:
    """Fetch the model and the data sets of a run on the login node, and verify them with the network off.

    Fills the caches that the job will use (HF_HOME of launch.env counts). Paths on disk are only verified.
    Ends with 78 when the job would miss something.
    """
    request = load_request(config_name, [*sets, *overrides])
    is_complete = True
    for outcome in fill_caches(request.config, request.environ, verify_only=verify_only):
        if outcome.error is None:
            size = file_size(outcome.num_bytes)
            echo(f"{outcome.item!s:<{_NAME_COLUMNS}}  {size:>10}  verified  {outcome.folder}")
        else:
            is_complete = False
            echo(f"error: {outcome.error}", err=True)
    if not is_complete:
        sys.exit(EXIT_CONFIG)


def _context(optional_config: str | None, overrides: list[str]) -> Context:
    """Resolve what doctor looks at; a config that does not load is a finding, not an error."""
    queue = job_queue()
    if optional_config is None:
        return Context(None, queue.with_own_settings(LaunchConfig(), os.environ), os.environ)
    try:
        request = load_request(optional_config, overrides).for_queue(queue)
    except ConfigError as error:
        return Context(None, LaunchConfig(), os.environ, str(error))
    return Context(request.config, request.config.launch, request.environ)
