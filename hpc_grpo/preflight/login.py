"""The checks of the login node: all that can be known before any node is asked for."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.environment import PROXIES, SCHEDULER_PREFIXES, environment_report, is_denied
from hpc_grpo.launch.place import job_queue
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.launch.place.slurm.partition import ask_associations, ask_version
from hpc_grpo.preflight import scheduler
from hpc_grpo.preflight.findings import Context, Finding, Group, failure, guarded, ok, skipped, warning
from hpc_grpo.preflight.folders import run_folder_finding
from hpc_grpo.preflight.inputs import input_findings, refusals, refuse_missing_python
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system import hugging_face
from hpc_grpo.system.commands import Answer

NAME = "login"
NEEDED_BY_A_JOB = ("config", "partition", "account", "walltime", "submit options", "run folder", "variables")
"""Checks without whose success no job is submitted to examine nodes."""

_SBATCH_DEADLINE_S = 10.0
_REACH_LAUNCHING = ("LD_PRELOAD",)
"""Variables that training is spared, but not the supervisor and the node agents, which start first."""

_OTHERS_BITS = stat.S_IRWXG | stat.S_IRWXO


def login_group(context: Context, num_nodes: int, partitions: Answer | None) -> Group:
    """Return all findings of the login node; `partitions` is None in a job, whose partition Slurm has accepted."""
    findings = [_config(context)]
    if partitions is None:
        findings.append(skipped("partition", "this is a job: Slurm has taken it"))
    else:
        findings += scheduler_findings(context, num_nodes, partitions)
    findings += [
        guarded("run folder", lambda: run_folder_finding(context.root)),
        *input_findings(context),
        guarded("secret files", lambda: secret_files_finding(context)),
        guarded("variables", lambda: variables_finding(context)),
        guarded("proxies", lambda: proxies_finding(context)),
    ]
    return Group(NAME, tuple(findings))


def scheduler_findings(context: Context, num_nodes: int, partitions: Answer) -> Iterator[Finding]:
    """Check Slurm, partition, account, walltime and options; with `partitions`, three calls to the scheduler in all."""
    launch, associations = context.launch, ask_associations()
    found = [
        guarded("slurm", lambda: scheduler.version_finding(ask_version())),
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
    """Check that sbatch, which submits nothing for this, would take the job of `hpc-grpo submit`."""
    check = "submit options"
    launch = context.launch.model_copy(update={"num_nodes": num_nodes})
    run = RunDir(context.root / (context.config.run.name if context.config else "doctor"))
    try:
        refuse_missing_python(launch)
        estimate = job_queue().start_estimate(JobRequest(run, launch, attempt_command(run)), _SBATCH_DEADLINE_S)
    except ConfigError as error:
        return failure(check, str(error), "correct what it names: launch.slurm.extra, launch.python")
    except LaunchError as error:
        return failure(check, str(error), "change what Slurm names: launch.slurm.*, launch.slurm.extra")
    lines = [line for line in estimate.splitlines() if "to start at" in line]
    return ok(check, lines[-1].partition(": ")[2] if lines else "sbatch would take the job")


def variables_finding(context: Context) -> Finding:
    """Check that no secret is in the config, and that nothing harmful reaches training or what starts it."""
    check, launch = "variables", context.launch
    for error in refusals(context.config, only=check) if context.config else ():
        return failure(check, str(error), "take it out of the config, in which it is written down")
    if refused := [name for name in launch.pass_env if is_denied(name.rstrip("*"))]:
        return warning(check, f"launch.pass_env cannot let through {', '.join(refused)}", "take it out of pass_env")
    if early := [name for name in _REACH_LAUNCHING if context.environ.get(name)]:
        fix = f"unset {' '.join(early)} before submitting; hpc-grpo env shows what reaches training"
        return warning(check, f"{', '.join(early)} would change the Python of the supervisor", fix)
    if str(launch.slurm.extra.get("export", "ALL")).partition(",")[0].upper() != "ALL":
        says = f"launch.slurm.extra.export = {launch.slurm.extra['export']} keeps your PATH and tokens out of the job"
        return warning(check, says, "take it out: training gets only what hpc-grpo lets through anyway")
    report = environment_report(context.environ, launch)
    denied = [v.name for v in report if v.outcome == "dropped" and is_denied(v.name)]
    dropped = [name for name in denied if not name.startswith(tuple(SCHEDULER_PREFIXES))]  # which every job has
    return ok(check, f"kept out of training: {', '.join(dropped)}" if dropped else "none that must be kept out")


def proxies_finding(context: Context) -> Finding:
    """Check that a proxy reaches training where the job may download, and that no_proxy keeps it from the nodes."""
    check, environ = "proxies", context.environ
    found = [name for name in environ if name.lower() in PROXIES and environ[name]]
    if not found:
        return ok(check, "none")
    passed = [v.name for v in environment_report(environ, context.launch) if v.outcome != "dropped" and v.name in found]
    if not passed and not hugging_face.is_offline(context.job_environ):
        fix = f"launch.pass_env=[{', '.join(found)}] (nodes are then spared it), or HF_HUB_OFFLINE=1 in launch.env"
        return warning(check, f"{', '.join(found)} stays behind, and the job may download", fix)
    if not any(environ.get(name) for name in ("no_proxy", "NO_PROXY")):
        fix = "export no_proxy=localhost,127.0.0.1 and the nodes' network, for programs of your own"
        return warning(check, f"{', '.join(found)} is set without no_proxy", fix)
    return ok(check, f"{', '.join(found)}, with no_proxy; {'let through' if passed else 'kept out of training'}")


def secret_files_finding(context: Context) -> Finding:
    """Check that only the user may read the files with tokens and keys."""
    found = [path for path in secret_files(context) if path.is_file()]
    if not found:
        return skipped("secret files", "none found")
    return judged_secret_files({path: path.stat().st_mode for path in found})


def judged_secret_files(modes: Mapping[Path, int]) -> Finding:
    """Judge files by their modes, which are as of stat(2)."""
    if exposed := [path for path, mode in modes.items() if mode & _OTHERS_BITS]:
        says = ", ".join(f"{path} has mode {stat.S_IMODE(modes[path]):04o}" for path in exposed)
        return failure("secret files", says, f"chmod 600 {_listed(exposed)}")
    return ok("secret files", f"yours alone: {_listed(modes)}")


def secret_files(context: Context) -> Iterator[Path]:
    """Yield the files where W&B, Hugging Face and this run keep tokens; they need not exist."""
    environ = context.environ
    yield Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / ".netrc")
    if "HF_TOKEN_PATH" in environ:
        yield Path(environ["HF_TOKEN_PATH"])
    # `hf auth login` writes below the shell's; the job's may be elsewhere.
    for folder in dict.fromkeys((hugging_face.home(environ), hugging_face.home(context.job_environ))):
        yield from (folder / name for name in ("token", "stored_tokens"))
    if context.config is not None:
        yield RunDir(context.root / context.config.run.name).secret


def _listed(paths: Iterable[Path]) -> str:
    return " ".join(map(str, paths))
