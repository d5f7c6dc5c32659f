"""The checks of the login node: what can be known before any node is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.preflight import scheduler
from hpc_grpo.preflight.asking import Answer
from hpc_grpo.preflight.cached_inputs import data_finding, model_finding
from hpc_grpo.preflight.context import Context
from hpc_grpo.preflight.environment import proxies_finding, secret_files_finding, variables_finding
from hpc_grpo.preflight.findings import Finding, Group, failure, guarded, ok, skipped
from hpc_grpo.preflight.folders import run_folder_finding
from hpc_grpo.preflight.inputs import refuse_missing_python
from hpc_grpo.run.paths import RunDir

NAME = "login"
_SBATCH_DEADLINE_S = 10.0
NEEDED_BY_A_JOB = ("config", "partition", "account", "walltime", "submit options", "run folder", "variables")


def login_group(context: Context, num_nodes: int, partitions: Answer | None) -> Group:
    """All findings of this place; `partitions` is scontrol's answer, None in a job: Slurm has already taken it."""
    findings = [_config(context)]
    if partitions is None:
        findings.append(skipped("partition", "this is a job: Slurm has taken it"))
    else:
        findings += scheduler_findings(context, num_nodes, partitions)
    findings += [
        guarded("run folder", lambda: run_folder_finding(context.root)),
        guarded("model", lambda: model_finding(context)),
        guarded("data", lambda: data_finding(context)),
        guarded("secret files", lambda: secret_files_finding(context)),
        guarded("variables", lambda: variables_finding(context)),
        guarded("proxies", lambda: proxies_finding(context)),
    ]
    return Group(NAME, tuple(findings))


def scheduler_findings(context: Context, num_nodes: int, partitions: Answer) -> Iterator[Finding]:
    """Partition, account, walltime and options; with `partitions`, three calls to the scheduler in all."""
    launch, associations = context.launch, scheduler.ask_associations()
    found = [
        guarded("partition", lambda: scheduler.partition_finding(launch, partitions, num_nodes)),
        guarded("account", lambda: scheduler.account_finding(launch, associations, partitions)),
        guarded("walltime", lambda: scheduler.walltime_finding(launch, partitions, associations)),
    ]
    yield from found
    if any(finding.status == "failure" for finding in found):
        yield skipped("submit options", "Slurm would refuse the job for what is above")
    elif partitions.is_absent:
        yield skipped("submit options", partitions.error)
    else:
        yield guarded("submit options", lambda: _submit_options(context, num_nodes))


def _config(context: Context) -> Finding:
    check = "config"
    if context.config is not None:
        return ok(check, f"loads; the run is {context.config.run.name}")
    if not context.config_error:
        return skipped(check, context.why_no_config)
    return failure(check, context.config_error, "correct what it names; `hpc-grpo config CONFIG` prints every key")


def _submit_options(context: Context, num_nodes: int) -> Finding:
    """Ask sbatch, which submits nothing for it, whether it would take the job of `hpc-grpo submit`."""
    from hpc_grpo.launch.place.slurm import sbatch as slurm

    check = "submit options"
    launch = context.launch
    launch = launch.model_copy(update={"slurm": launch.slurm.model_copy(update={"num_nodes": num_nodes})})
    run = RunDir(context.root / (context.config.run.name if context.config else "doctor"))
    try:
        refuse_missing_python(launch)
        estimate = slurm.start_estimate(slurm.render(launch, run, slurm.attempt_command(run)), _SBATCH_DEADLINE_S)
    except ConfigError as error:
        return failure(check, str(error), "correct what it names: launch.slurm.extra, launch.python")
    except LaunchError as error:
        return failure(check, str(error), "change what Slurm names: launch.slurm.*, launch.slurm.extra")
    lines = [line for line in estimate.splitlines() if "to start at" in line]
    return ok(check, lines[-1].partition("sbatch: ")[2] if lines else "sbatch would take the job")
