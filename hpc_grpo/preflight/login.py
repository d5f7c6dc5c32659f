"""The checks of the login node: facts that are known before a node is requested."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.environment import PROXIES, SCHEDULER, environment_report, is_denied, is_named
from hpc_grpo.launch.place import job_queue
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.launch.place.slurm import partition
from hpc_grpo.preflight.findings import Context, Finding, Findings, failure, guarded, ok, skipped, warning
from hpc_grpo.preflight.folders import run_folder_finding
from hpc_grpo.preflight.inputs import input_findings, refusals, refuse_missing_python
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system import hugging_face
from hpc_grpo.system.commands import Answer

NAME = "login"
NEEDED_BY_A_JOB = ("config", "partition", "account", "walltime", "submit options", "run folder", "variables")
"""If one of these checks fails, no job is submitted to examine nodes."""

_ASK_AGAIN = "try the same command by hand; the site's Slurm may be down"
_SBATCH_DEADLINE_S = 10.0
_OTHERS_BITS = stat.S_IRWXG | stat.S_IRWXO


def login_findings(context: Context, num_nodes: int, partitions: Answer | None) -> Findings:
    """Return all findings of the login node. `partitions` is None in a job: Slurm has accepted its partition."""
    of_slurm = {"partition": skipped("this is a job: Slurm has accepted it")}
    if partitions is not None:
        of_slurm = scheduler_findings(context, num_nodes, partitions)
    return {
        "config": _config(context),
        **of_slurm,
        "run folder": guarded(lambda: run_folder_finding(context.root)),
        **input_findings(context),
        "secret files": guarded(lambda: secret_files_finding(context)),
        "variables": guarded(lambda: variables_finding(context)),
        "proxies": guarded(lambda: proxies_finding(context)),
    }


def scheduler_findings(context: Context, num_nodes: int, partitions: Answer) -> Findings:
    """Check Slurm, partition, account, walltime and options. Makes up to two calls to the scheduler."""
    launch, associations = context.launch, partition.ask_associations()
    found = {
        "slurm": guarded(lambda: version_finding(partition.ask_version())),
        "partition": guarded(lambda: partition_finding(launch, partitions, num_nodes)),
        "account": guarded(lambda: account_finding(launch, associations, partitions)),
        "walltime": guarded(lambda: walltime_finding(launch, partitions, associations)),
    }
    if any(finding.status == "failure" for finding in found.values()):
        options = skipped("Slurm would refuse the job: see the failures above")
    elif partitions.is_absent:
        options = skipped(partitions.error)
    else:
        options = guarded(lambda: _submit_options(context, num_nodes))
    return {**found, "submit options": options}


def version_finding(answer: Answer) -> Finding:
    """Check that this site's Slurm is not older than the oldest tested one. `answer` is the output of --version."""
    if answer.error:
        return skipped(answer.error)
    found = re.search(r"(\d+)\.(\d+)", answer.text)
    if found is None:
        return skipped(f"{answer.text.strip()!r} names no version")
    oldest = f"{partition.OLDEST_SLURM[0]}.{partition.OLDEST_SLURM[1]:02}"
    if (int(found[1]), int(found[2])) < partition.OLDEST_SLURM:
        says = f"Slurm {found[0]} is older than {oldest}, the oldest that is tested: steps may get other CPUs and GPUs"
        return warning(says, "try a run of a few steps on two nodes first, or ask your site for a newer one")
    return ok(f"{answer.text.strip()}; {oldest} and newer are supported")


def partition_finding(launch: LaunchConfig, answer: Answer, num_nodes: int) -> Finding:
    """Check that the partition exists, is up, and has the requested number of nodes and GPUs."""
    slurm = launch.slurm
    if answer.error:
        return _unanswered(answer)
    if slurm.partition and "," in slurm.partition:
        return skipped(f"several: {slurm.partition}. The check of submit options tests them together")
    partitions = partition.parse_partitions(answer.text)
    chosen, names = partition.chosen_partition(slurm, partitions), ", ".join(p.name for p in partitions) or "none"
    choose = f"set launch.slurm.partition to one of: {names}"
    if chosen is None:
        what = f"there is no partition {slurm.partition}" if slurm.partition else "the site has no default partition"
        return failure(what, choose)
    if chosen.fields.get("State", "UP") != "UP":
        return failure(f"{chosen.name} is {chosen.fields['State']}", f"wait, or {choose}")
    if num_nodes > chosen.max_nodes and "qos" not in slurm.extra:  # a QOS may allow more
        fewer = f"request fewer (launch.num_nodes), or {choose}"
        says = f"{chosen.name} has {chosen.num_nodes} nodes, {chosen.max_nodes} per job; {num_nodes} are requested"
        return failure(says, fewer)
    gpus = chosen.num_gpus
    if gpus is None:
        return ok(f"{chosen.name} is up: {chosen.num_nodes} nodes")
    if (wanted := slurm.gpus_per_node * num_nodes) > gpus:
        says = f"{chosen.name} has {gpus} GPUs, {wanted} are requested"
        return failure(says, f"lower launch.num_nodes or launch.slurm.gpus_per_node, or {choose}")
    if not wanted and not slurm.has_whole_nodes:
        says = f"{chosen.name} has {gpus} GPUs, none is requested"
        return warning(says, "set launch.slurm.gpus_per_node, or extra.exclusive: some sites refuse jobs without a GPU")
    return ok(f"{chosen.name} is up: {chosen.num_nodes} nodes, {gpus} GPUs")


def account_finding(launch: LaunchConfig, associations: Answer, partitions: Answer) -> Finding:
    """Check that the user may charge the account, and that the partition accepts it."""
    wanted = launch.slurm.account
    if associations.error:  # a site may have no accounting
        return skipped(associations.error)
    accounts = list(dict.fromkeys(one.account for one in partition.parse_associations(associations.text)))
    listed = ", ".join(accounts)
    if wanted is None:
        if not accounts:
            return warning("none is set, and sacctmgr lists none of yours", "set launch.slurm.account")
        return ok(f"your default; yours are: {listed}")
    if wanted.lower() not in [account.lower() for account in accounts]:
        fix = f"set launch.slurm.account to one of: {listed}" if accounts else "ask your site for an account"
        return failure(f"{wanted} is not one of your accounts", fix)
    chosen = partition.chosen_partition(launch.slurm, partition.parse_partitions(partitions.text))
    if chosen is not None and not chosen.admits(wanted):
        return failure(f"partition {chosen.name} does not accept {wanted}", "another account or partition")
    return ok(f"{wanted} is yours")


def walltime_finding(launch: LaunchConfig, partitions: Answer, associations: Answer) -> Finding:
    """Check that `launch.slurm.time_min` is within the limits of the partition and of the account."""
    slurm = launch.slurm
    if partitions.error:
        return _unanswered(partitions)
    chosen = partition.chosen_partition(slurm, partition.parse_partitions(partitions.text))
    if chosen is None:
        return skipped("the partition is not known")
    limits = {f"partition {chosen.name}": None if "qos" in slurm.extra else chosen.max_minutes}  # a QOS may allow more
    for one in partition.parse_associations(associations.text):
        is_charged = slurm.account and one.account.lower() == slurm.account.lower()
        if is_charged and one.partition in ("", chosen.name):
            limits[f"account {one.account}"] = one.max_minutes
    for who, limit_min in limits.items():
        if limit_min is not None and slurm.time_min > limit_min:
            says = f"{slurm.time_min} min is more than {who} allows: {limit_min} min"
            return failure(says, f"set launch.slurm.time_min={limit_min}; a chain of jobs continues the run")
    known = [limit for limit in limits.values() if limit is not None]
    return ok(f"{slurm.time_min} min; allowed are {f'{min(known)} min' if known else 'any'}")


def _unanswered(answer: Answer) -> Finding:
    return skipped(answer.error) if answer.is_absent else failure(answer.error, _ASK_AGAIN)


def _config(context: Context) -> Finding:
    if context.config is not None:
        return ok(f"loads; the run is {context.config.run.name}")
    if not context.config_error:
        return skipped(context.why_no_config)
    return failure(context.config_error, "correct what the error names; `hpc-grpo config CONFIG` prints every key")


def _submit_options(context: Context, num_nodes: int) -> Finding:
    """Check that sbatch would accept the job of `hpc-grpo submit`, without submitting it."""
    launch = context.launch.model_copy(update={"num_nodes": num_nodes})
    run = RunDir(context.root / (context.config.run.name if context.config else "doctor"))
    try:
        refuse_missing_python(launch)
        estimate = job_queue().start_estimate(JobRequest(run, launch, attempt_command(run)), _SBATCH_DEADLINE_S)
    except ConfigError as error:
        return failure(str(error), "correct what the error names: launch.slurm.extra, launch.python")
    except LaunchError as error:
        return failure(str(error), "change what Slurm names: launch.slurm.*, launch.slurm.extra")
    lines = [line for line in estimate.splitlines() if "to start at" in line]
    return ok(lines[-1].partition(": ")[2] if lines else "sbatch would accept the job")


def variables_finding(context: Context) -> Finding:
    """Check that the config holds no secret, and that no harmful variable reaches training or its start."""
    launch = context.launch
    for error in refusals([context.config], only="variables") if context.config else ():
        return failure(str(error), "remove it from the config, which is written to disk")
    if refused := [name for name in launch.pass_env if is_denied(name.rstrip("*"))]:
        return warning(f"launch.pass_env cannot let through {', '.join(refused)}", "remove it from pass_env")
    if context.environ.get("LD_PRELOAD"):  # dropped for training, but supervisor and node agents start before
        fix = "unset LD_PRELOAD before submitting; hpc-grpo config --env shows what reaches training"
        return warning("LD_PRELOAD would change the Python of the supervisor", fix)
    if str(launch.slurm.extra.get("export", "ALL")).partition(",")[0].upper() != "ALL":
        says = f"launch.slurm.extra.export = {launch.slurm.extra['export']} keeps your PATH and tokens out of the job"
        return warning(says, "remove it: hpc-grpo filters the variables of training anyway")
    report = environment_report(context.environ, launch)
    denied = [v.name for v in report if v.outcome == "dropped" and is_denied(v.name)]
    dropped = [name for name in denied if not is_named(name, SCHEDULER)]  # every job has these
    return ok(f"kept out of training: {', '.join(dropped)}" if dropped else "no harmful variable is set")


def proxies_finding(context: Context) -> Finding:
    """Check that a proxy reaches training if the job may download, and that no_proxy excludes the nodes from it."""
    environ = context.environ
    found = [name for name in environ if name.lower() in PROXIES and environ[name]]
    if not found:
        return ok("none")
    passed = [v.name for v in environment_report(environ, context.launch) if v.outcome != "dropped" and v.name in found]
    if not passed and not hugging_face.is_offline(context.job_environ):
        fix = f"launch.pass_env=[{', '.join(found)}] (no_proxy then names the nodes), or HF_HUB_OFFLINE=1 in launch.env"
        return warning(f"{', '.join(found)} does not reach training, and the job may download", fix)
    if not any(environ.get(name) for name in ("no_proxy", "NO_PROXY")):
        fix = "export no_proxy=localhost,127.0.0.1 and the nodes' network, for programs of your own"
        return warning(f"{', '.join(found)} is set without no_proxy", fix)
    return ok(f"{', '.join(found)}, with no_proxy; {'let through' if passed else 'kept out of training'}")


def secret_files_finding(context: Context) -> Finding:
    """Check that only the user may read the files with tokens and keys."""
    modes = {path: path.stat().st_mode for path in secret_files(context) if path.is_file()}
    if not modes:
        return skipped("none found")
    if exposed := [path for path, mode in modes.items() if mode & _OTHERS_BITS]:
        says = ", ".join(f"{path} has mode {stat.S_IMODE(modes[path]):04o}" for path in exposed)
        return failure(says, f"chmod 600 {' '.join(map(str, exposed))}")
    return ok(f"yours alone: {' '.join(map(str, modes))}")


def secret_files(context: Context) -> Iterator[Path]:
    """Yield the files where W&B, Hugging Face and this run keep tokens. The files need not exist."""
    environ = context.environ
    yield Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / ".netrc")
    if "HF_TOKEN_PATH" in environ:
        yield Path(environ["HF_TOKEN_PATH"])
    # `hf auth login` writes to the shell's Hugging Face home; the job's home may differ.
    for folder in dict.fromkeys((hugging_face.home(environ), hugging_face.home(context.job_environ))):
        yield from (folder / name for name in ("token", "stored_tokens"))
    if context.config is not None:
        yield RunDir(context.root / context.config.run.name).secret
