"""Before a run: what it needs, and what of the environment reaches it."""

from __future__ import annotations

import sys

import click

from hpc_grpo.cli.options import CONFIG, OVERRIDES, SET
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.plan.memory import GH200, Hardware
from hpc_grpo.types import GIB

_GIB = click.FloatRange(0, min_open=True)
_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")


@click.command()
@CONFIG
@OVERRIDES
@SET
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Default: launch.slurm.num_nodes.")
@click.option("--size", type=click.Choice(_SIZES), help="Plan with this shape of Qwen2.5, not with model.path.")
@click.option(
    "--gpu-memory-gib", type=_GIB, default=GH200.gpu_bytes / GIB, show_default=True, metavar="GIB", help="Of one GPU."
)
@click.option(
    "--host-memory-gib",
    type=_GIB,
    default=GH200.host_bytes / GIB,
    show_default=True,
    metavar="GIB",
    help="Of a node, for the job.",
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
    from hpc_grpo.cli.request import load_request
    from hpc_grpo.plan.requested import plan_of, text_of

    request = load_request(config_name, [*sets, *overrides])
    hardware = Hardware(int(gpu_memory_gib * GIB), int(host_memory_gib * GIB))
    planned = plan_of(request.config, request.environ, hardware, nodes=nodes, size=size)
    click.echo(text_of(planned), nl=False)
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

    from hpc_grpo.cli.request import load_request
    from hpc_grpo.config import LaunchConfig
    from hpc_grpo.engine.vllm import ENVIRONMENT
    from hpc_grpo.launch.environment.report import environment_report, report_text

    request = load_request(optional_config, []) if optional_config else None
    launch = request.config.launch if request else LaunchConfig()
    variables = environment_report(request.environ if request else os.environ, launch, ENVIRONMENT)
    if as_json:
        click.echo(json.dumps([asdict(variable) for variable in variables], indent=2))
    else:
        click.echo(report_text(variables), nl=False)


COMMANDS = (plan, env)
