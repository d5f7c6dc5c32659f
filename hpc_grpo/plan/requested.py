"""The plan of a run that was asked for, for the commands that show one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.plan.fit import Plan
    from hpc_grpo.plan.memory import Hardware
    from hpc_grpo.plan.pace import MeasuredPace
    from hpc_grpo.plan.shapes import Model


def plan_of(
    config: Config,
    environ: Mapping[str, str],
    hardware: Hardware,
    *,
    nodes: int | None = None,
    size: str | None = None,
) -> Plan:
    """The plan on `nodes`, else on those of the config, with the shape of `size`, else of model.path.

    `environ` is the environment that the job starts from: it says where the model is looked for.
    Raises ConfigError where the model is not on this machine, or is none that can be planned.
    """
    from hpc_grpo.plan.fit import make_plan
    from hpc_grpo.plan.shapes import family_model

    model = family_model(size) if size is not None else _model(config, environ)
    return make_plan(model, config, nodes or config.launch.slurm.num_nodes, hardware)


def text_of(plan: Plan) -> str:
    """The plan in words, with the pace of the steps that the run has taken."""
    from hpc_grpo.plan.report import plan_text

    return plan_text(plan, _pace(plan.config))


def plan_or_reason(config: Config, environ: Mapping[str, str]) -> str:
    """The plan in words on the hardware that `hpc-grpo plan` assumes; else one line that says why there is none."""
    from hpc_grpo.plan.memory import GH200
    from hpc_grpo.types import GIB

    try:
        text = text_of(plan_of(config, environ, GH200))
    except ConfigError as error:
        return f"No plan: {' '.join(str(error).split())}\n"
    gpu_gib, host_gib = GH200.gpu_bytes // GIB, GH200.host_bytes // GIB
    assumed = f"{gpu_gib} GiB on each GPU and {host_gib} GiB of a node's memory; `hpc-grpo plan` takes other values"
    return f"Plan, assuming {assumed}.\n\n{text}"


def _model(config: Config, environ: Mapping[str, str]) -> Model:
    """Read the model of model.path, where the job will look for it."""
    from hpc_grpo.launch.environment.rules import filtered
    from hpc_grpo.plan.model_source import read_model

    # A site's variables may exist inside its jobs only; what they would name is then looked for as usual.
    in_job = {name: value for name, value in filtered(environ, (), config.launch.env).items() if "$" not in value}
    return read_model(config.model.path, {**environ, **in_job})


def _pace(config: Config) -> MeasuredPace | None:
    """What the run directory says about steps already taken."""
    from hpc_grpo.driver.train_length import train_length
    from hpc_grpo.plan.pace import measured_pace
    from hpc_grpo.run.attempt import read_attempts
    from hpc_grpo.run.paths import RunDir
    from hpc_grpo.run.progress import read_metrics, read_state

    run = RunDir(config.run_path)
    state = read_state(run)
    is_known = config.train.total_epochs is None
    total_steps = train_length(config, 1).total_steps if is_known else state.total_steps if state else None
    nodes = {record.attempt: len(record.nodes) for record in read_attempts(run)}
    return measured_pace(read_metrics(run.metrics), nodes, total_steps)
