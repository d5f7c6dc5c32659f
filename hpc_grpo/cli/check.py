"""The commands for the time before a run: `config`, `plan`, `doctor` and `prefetch`."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.foreign import foreign_options, translated
from hpc_grpo.cli.options import (
    CONFIG,
    CONFIG_OR_RUN,
    JSON,
    OVERRIDES,
    complete,
    echo,
    echo_json,
    run_unless_config,
    show,
    slurm_overrides,
)
from hpc_grpo.cli.request import load_request
from hpc_grpo.config import Config, LaunchConfig, to_yaml, with_overrides
from hpc_grpo.config.describe import describe
from hpc_grpo.config.resources import expects_gpus
from hpc_grpo.engine.vllm import ENVIRONMENT
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.launch.environment import environment_report
from hpc_grpo.launch.environment import report_text as variables_text
from hpc_grpo.launch.place import job_queue
from hpc_grpo.plan.fit import plan_of
from hpc_grpo.plan.memory import HARDWARE, Hardware, hardware_named
from hpc_grpo.plan.model import FAMILY
from hpc_grpo.preflight import inputs
from hpc_grpo.preflight.diagnosis import diagnose, diagnose_in_job
from hpc_grpo.preflight.findings import GROUPS, Context, facts_of, has_failure, report_text
from hpc_grpo.preflight.prefetch import prefetch as fill_caches
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.simulate.measured import read_measurements
from hpc_grpo.simulate.text import plan_text, settings_of, simulation_facts, simulation_text
from hpc_grpo.system.gpus import ask_nvidia_smi, parse_gpus
from hpc_grpo.system.memory import host_memory
from hpc_grpo.system.readable import file_size
from hpc_grpo.types import GIB

_GIB = click.FloatRange(0, min_open=True)
_NAME_COLUMNS = 48


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "words",
    nargs=-1,
    metavar="[CONFIG|RUN] [KEY]... [KEY=VALUE]...",
    type=click.UNPROCESSED,
    shell_complete=complete("configs", "runs", "keys"),
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="With --from-…: set a key of the result.")
@click.option("--changed", is_flag=True, help="Show only keys that differ from their default.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print only the resolved YAML.")
@JSON
@click.option("--env", "shows_env", is_flag=True, help="Show which environment variables reach training, and why.")
@foreign_options
def config(
    words: tuple[str, ...],
    sets: tuple[str, ...],
    changed: bool,
    as_yaml: bool,
    as_json: bool,
    shows_env: bool,
    **foreign: Any,
) -> None:
    """Print every key of a config: its value, its default and what it means. With KEY: only this key or section.

    --from-… translates the config of another system: YAML on stdout, a report on each key on stderr. Further words
    are words of the other system; --set changes the result. Exits with 78 if a key cannot be translated.
    """
    if translated(words, sets, foreign):
        return
    if unknown := [word for word in words if word.startswith("-")]:
        raise click.NoSuchOption(unknown[0])
    if shows_env:
        request = load_request(words[0], [*sets, *words[1:]]) if words else None
        launch = request.config.launch if request else LaunchConfig()
        variables = environment_report(request.environ if request else os.environ, launch, ENVIRONMENT)
        show([asdict(variable) for variable in variables], variables_text(variables), as_json)
        return
    if not words:
        raise click.UsageError("Missing argument 'CONFIG'. `hpc-grpo init` writes one.")
    name, keys = words[0], [word for word in words[1:] if "=" not in word]
    overrides = [*sets, *(word for word in words[1:] if "=" in word)]
    if as_json + as_yaml + bool(keys or changed) > 1:
        raise click.UsageError("Give one of these: --json, --yaml, or KEY and --changed. The first two print all keys.")
    if (run := run_unless_config(name)) is not None:
        resolved = with_overrides(read_config(run), overrides)
    else:
        request = load_request(name, overrides)
        request.tell()
        resolved = request.config
    text = to_yaml(resolved) if as_yaml else describe(resolved, keys, only_changed=changed)
    show(resolved.model_dump(mode="json"), text, as_json)


def _numbers(least: int) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...]]:
    """Return the callback of an option that takes whole numbers of at least `least`, with commas between them."""

    def parse(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
        words = [word.strip() for word in value.split(",")] if value is not None else []
        if not all(word.isdecimal() and int(word) >= least for word in words):
            raise click.BadParameter(f"{value!r}: give whole numbers of at least {least}, such as 2,8,64.")
        return tuple(dict.fromkeys(map(int, words)))

    return parse


@click.command()
@CONFIG_OR_RUN
@OVERRIDES
@click.option(
    "--nodes",
    callback=_numbers(1),
    metavar="N",
    help="Number of nodes; default: launch.num_nodes. With RUN: several, such as 2,8.",
)
@click.option("--gpus", type=click.IntRange(0), metavar="N", help="GPUs of a node: launch.slurm.gpus_per_node.")
@click.option("--learners", callback=_numbers(1), metavar="N,…", help="With RUN: numbers of learners per node.")
@click.option("--lag", "lags", callback=_numbers(0), metavar="N,…", help="With RUN: values of rollout.max_policy_lag.")
@click.option("--size", type=click.Choice(list(FAMILY)), help="Plan for Qwen2.5 of this size instead of model.path.")
@click.option(
    "--hardware",
    type=click.Choice(list(HARDWARE)),
    help="Kind of node; h100-* and a100 have 80 GB. Default: this machine's GPUs, else gh200.",
)
@click.option("--gpu-memory-gib", type=_GIB, metavar="GIB", help="Memory of one GPU. Default: from --hardware.")
@click.option(
    "--host-memory-gib", type=_GIB, metavar="GIB", help="Memory of a node. Default: from --hardware, or this machine's."
)
@JSON
def plan(
    config_name: str,
    overrides: tuple[str, ...],
    nodes: tuple[int, ...],
    gpus: int | None,
    learners: tuple[int, ...],
    lags: tuple[int, ...],
    size: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Estimate memory, disk and time of a run before it starts: what fits, what to change, which placement is fastest.

    Exits with 78 if the run does not fit its nodes. Does not check free disk space: submit does. Loads no model.

    With RUN, simulate the run with other numbers of nodes and learners, and other lags: steps/h, idle shares and
    node-hours. Uses the lengths and times that the run has measured. Needs the full installation, but no nodes.
    """
    if (run := run_unless_config(config_name)) is not None:
        if any(value is not None for value in (size, gpus, *asked.values())) or overrides:
            raise click.UsageError("A RUN allows only --nodes, --learners, --lag and --json.")
        config = read_config(run)
        settings = settings_of(config, nodes or (1, 2, 4, 8), learners or None, lags or None)
        measured = read_measurements(run, config)
        if as_json:
            echo_json(simulation_facts(config, measured, settings))
        else:
            echo(simulation_text(config, measured, settings), nl=False)
        return
    if learners or lags or len(nodes) > 1:
        raise click.UsageError("--learners, --lag and several --nodes need a RUN, whose measured times they use.")
    request = load_request(config_name, [*overrides, *slurm_overrides({"gpus_per_node": gpus})])
    start = inputs.start_of(request.config)
    if size is None:
        inputs.refuse_unsupported_model(request.config, start, request.environ)
    inputs.refuse_missing_inputs(request.config, start, only_functions=True)
    inputs.refuse_wrong_rewards(request.config, start)
    inputs.refuse_wrong_share(request.config, start)
    node = _hardware(request.config, **asked)
    planned = plan_of(request.config, request.environ, node, nodes=next(iter(nodes), None), size=size)
    if as_json:
        budgets = {
            budget.device: {"gib": budget.num_bytes / GIB, "of": budget.capacity_bytes / GIB, "fits": budget.fits}
            for budget in planned.budgets
        }
        echo_json({"fits": planned.fits, "problems": planned.problems, "budgets": budgets})
    else:
        echo(plan_text(planned), nl=False)
        for warning in inputs.small_evals(request.config):
            echo(warning, err=True)
    if not planned.fits:
        sys.exit(EXIT_CONFIG)


def _hardware(
    config: Config, hardware: str | None, gpu_memory_gib: float | None, host_memory_gib: float | None
) -> Hardware:
    """Return the node to plan for, from the options or else from this machine. Prints what it assumes."""
    is_here, on_gpus = hardware is None, expects_gpus(config)
    gpus = parse_gpus(ask_nvidia_smi().text) if is_here and on_gpus else []
    found = hardware_named(gpus[0].name) if gpus else None
    node = HARDWARE[hardware or found or "gh200"]
    host = host_memory().total if is_here and not on_gpus else node.host_bytes
    gpu_gib, host_gib = gpu_memory_gib or node.gpu_bytes / GIB, host_memory_gib or host / GIB
    if not gpu_gib + host_gib < math.inf:
        raise ConfigError(
            f"--gpu-memory-gib = {gpu_gib:g}, --host-memory-gib = {host_gib:g}: give finite GiB, such as 80."
        )
    memory = f"{host_gib:.0f} GiB of a node's memory"
    if found:
        echo(f"GPUs of this machine: {gpus[0].name} (--hardware {found})", err=True)
    elif is_here and on_gpus:
        echo(f"No known GPU here: planned for gh200, GPUs of {gpu_gib:.0f} GiB, {memory} (--hardware).", err=True)
    elif is_here:
        echo(f"model.device = cpu: planned for {memory}, by default this machine's (--host-memory-gib).", err=True)
    return replace(node, gpu_bytes=int(gpu_gib * GIB), host_bytes=int(host_gib * GIB))


@click.command()
@click.argument("optional_config", metavar="[CONFIG]", required=False, shell_complete=complete("configs"))
@OVERRIDES
@click.option(
    "--nodes", type=click.IntRange(1), metavar="N", help="Check N compute nodes; from a login node in a short job."
)
@click.option(
    "--wait-min",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="MIN",
    help="Minutes to wait for the job of --nodes.",
)
@JSON
@click.option("--result", type=click.Path(path_type=Path), hidden=True, help="In the job of --nodes: where to write.")
def doctor(
    optional_config: str | None,
    overrides: tuple[str, ...],
    nodes: int | None,
    wait_min: float,
    as_json: bool,
    result: Path | None,
) -> None:
    """Check config, Slurm, nodes, network and GPUs before a run; each failure names its fix.

    On a login node: checks what is visible there. With --nodes N, also checks N compute nodes in a job of at most
    5 minutes. In an allocation: checks its nodes. Exits with 78 if a check failed.
    """
    if overrides and optional_config is None:
        raise ConfigError("KEY=VALUE changes a key of CONFIG: give a CONFIG first, such as local/tiny_grpo.")
    begun = time.monotonic()
    context = _context(optional_config, overrides)
    if result is not None:
        groups = diagnose_in_job(context)
        write_json_atomic(result, GROUPS.dump_python(groups))
    else:
        groups = diagnose(context, nodes, wait_min, tell=lambda text: echo(text, err=True))
    took_s = time.monotonic() - begun
    show(facts_of(groups), report_text(groups, took_s), as_json)
    if has_failure(groups):
        sys.exit(EXIT_CONFIG)


@click.command()
@CONFIG
@OVERRIDES
@click.option("--verify-only", is_flag=True, help="Fetch nothing. Only check that the job would find everything.")
@JSON
def prefetch(config_name: str, overrides: tuple[str, ...], verify_only: bool, as_json: bool) -> None:
    """Fetch the model and the data sets of a run on the login node, and verify them with the network off.

    Fills the caches that the job will use; respects HF_HOME in launch.env. Paths on disk are only verified.
    Exits with 78 if the job would miss something.
    """
    request = load_request(config_name, overrides)
    is_complete, found = True, []
    for item, result in fill_caches(request.config, request.environ, verify_only=verify_only):
        found.append({"item": str(item), "bytes": result.get("num_bytes", 0), "folder": result.get("folder", "")})
        if (error := result["error"]) is not None:
            is_complete, found[-1]["error"] = False, error
            echo(f"error: {error}", err=True)
        elif not as_json:
            echo(f"{item!s:<{_NAME_COLUMNS}}  {file_size(result['num_bytes']):>10}  verified  {result['folder']}")
    if as_json:
        echo_json(found)
    if not is_complete:
        sys.exit(EXIT_CONFIG)


def _context(optional_config: str | None, overrides: Sequence[str]) -> Context:
    """Return what the doctor checks. A config that does not load becomes a finding instead of an error."""
    queue = job_queue()
    if optional_config is None:
        return Context(None, queue.with_own_settings(LaunchConfig(), os.environ), os.environ)
    try:
        request = load_request(optional_config, overrides).for_queue(queue)
    except ConfigError as error:
        return Context(None, LaunchConfig(), os.environ, str(error))
    return Context(request.config, request.config.launch, request.environ)
