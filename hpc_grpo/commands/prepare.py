"""Before a run: what it needs, and what of the environment reaches it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hpc_grpo.commands.options import CONFIG, OVERRIDES, SET
from hpc_grpo.errors import EXIT_CONFIG

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.launch.request import Request
    from hpc_grpo.plan.pace import MeasuredPace
    from hpc_grpo.plan.shapes import Model

_GIB = click.FloatRange(0, min_open=True)
_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")


@click.command()
@CONFIG
@OVERRIDES
@SET
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Default: launch.slurm.num_nodes.")
@click.option("--size", type=click.Choice(_SIZES), help="Plan with this shape of Qwen2.5, not with model.path.")
@click.option("--gpu-memory-gib", type=_GIB, default=96.0, show_default=True, metavar="GIB", help="Of one GPU.")
@click.option(
    "--host-memory-gib", type=_GIB, default=460.0, show_default=True, metavar="GIB", help="Of a node, for the job."
)
def plan(
    config_name: str,
    overrides: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: int | None,
    size: str | None,
    gpu_memory_gib: float,
    host_memory_gib: float,
) -> None:
    """Add up the memory of a run, before it starts: what fits, and what to change where it does not.

    Ends with 78 when the run does not fit. Loads no model; the defaults are a GH200 node's memory.
    """
    from hpc_grpo.launch.request import load_request
    from hpc_grpo.plan.fit import make_plan
    from hpc_grpo.plan.memory import GIB, Hardware
    from hpc_grpo.plan.report import plan_text

    request = load_request(config_name, [*sets, *overrides])
    config = request.config
    hardware = Hardware(int(gpu_memory_gib * GIB), int(host_memory_gib * GIB))
    planned = make_plan(_model(request, size), config, nodes or config.launch.slurm.num_nodes, hardware)
    click.echo(plan_text(planned, _pace(config)), nl=False)
    if not planned.fits:
        sys.exit(EXIT_CONFIG)


@click.command()
@click.argument("optional_config", metavar="[CONFIG]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list; secrets are masked there too.")
def env(optional_config: str | None, as_json: bool) -> None:
    """Show which environment variables reach Ray and the actors, and why the others do not.

    With CONFIG, its launch.env and launch.pass_env count too. Values of secrets are never shown.
    """
    import json
    import os
    from dataclasses import asdict

    from hpc_grpo.config.launch_schema import LaunchConfig
    from hpc_grpo.launch.environment_report import environment_report, report_text
    from hpc_grpo.launch.request import load_request
    from hpc_grpo.rollout.engine_args import ENVIRONMENT

    request = load_request(optional_config, []) if optional_config else None
    launch = request.config.launch if request else LaunchConfig()
    environ = {**os.environ, **(request.environment if request else {})}
    variables = environment_report(environ, launch, ENVIRONMENT)
    if as_json:
        click.echo(json.dumps([asdict(variable) for variable in variables], indent=2))
    else:
        click.echo(report_text(variables), nl=False)


def _model(request: Request, size: str | None) -> Model:
    """The model of --size, or of model.path as the job will look for it."""
    import os

    from hpc_grpo.launch.environment import filtered
    from hpc_grpo.plan.model_source import read_model
    from hpc_grpo.plan.shapes import family_model

    if size is not None:
        return family_model(size)
    launch = request.config.launch
    environ = {**os.environ, **request.environment}
    # A site's variables may exist inside its jobs only; what they would name is then looked for as usual.
    in_job = {name: value for name, value in filtered(environ, (), launch.env).items() if "$" not in value}
    return read_model(request.config.model.path, {**environ, **in_job})


def _pace(config: Config) -> MeasuredPace | None:
    """What the run directory says about steps already taken."""
    from hpc_grpo.budget import make_budget
    from hpc_grpo.launch.attempt_record import read_attempts
    from hpc_grpo.metrics.jsonl import read_metrics
    from hpc_grpo.metrics.state import read_state
    from hpc_grpo.plan.pace import measured_pace
    from hpc_grpo.run_dir import RunDir

    run = RunDir(config.run_path)
    state = read_state(run)
    is_known = config.train.total_epochs is None
    total_steps = make_budget(config, 1).total_steps if is_known else state.total_steps if state else None
    nodes = {record.attempt: len(record.nodes) for record in read_attempts(run)}
    return measured_pace(read_metrics(run.metrics), nodes, total_steps)


COMMANDS = (plan, env)
