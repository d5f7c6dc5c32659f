"""Check partition, account and walltime against what Slurm allows, by its rules in launch/place/slurm/partition.py."""

from __future__ import annotations

import re

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.slurm.partition import OLDEST_SLURM, chosen_partition, parse_associations, parse_partitions
from hpc_grpo.preflight.findings import Finding, failure, ok, skipped, warning
from hpc_grpo.system.commands import Answer

_ASK_AGAIN = "try the same command by hand; the site's Slurm may be down"


def version_finding(answer: Answer) -> Finding:
    """Check that this site's Slurm is not older than the oldest that is tested; `answer` is that of --version."""
    check = "slurm"
    if answer.error:
        return skipped(check, answer.error)
    found = re.search(r"(\d+)\.(\d+)", answer.text)
    if found is None:
        return skipped(check, f"{answer.text.strip()!r} names no version")
    oldest = f"{OLDEST_SLURM[0]}.{OLDEST_SLURM[1]:02}"
    if (int(found[1]), int(found[2])) < OLDEST_SLURM:
        says = f"Slurm {found[0]} is older than {oldest}, the oldest that is tested: steps may get other CPUs and GPUs"
        return warning(check, says, "try a run of a few steps on two nodes first, or ask your site for a newer one")
    return ok(check, f"{answer.text.strip()}; {oldest} and newer are supported")


def partition_finding(launch: LaunchConfig, answer: Answer, num_nodes: int) -> Finding:
    """Check that the partition exists, is up, and has as many nodes and GPUs as are asked for."""
    check, slurm = "partition", launch.slurm
    if answer.error:
        return _unanswered(check, answer)
    if slurm.partition and "," in slurm.partition:
        return skipped(check, f"{slurm.partition} are several: the submit options say whether one takes the job")
    partitions = parse_partitions(answer.text)
    chosen, names = chosen_partition(slurm, partitions), ", ".join(p.name for p in partitions) or "none"
    choose = f"set launch.slurm.partition to one of: {names}"
    if chosen is None:
        what = f"there is no partition {slurm.partition}" if slurm.partition else "the site has no default partition"
        return failure(check, what, choose)
    if chosen.fields.get("State", "UP") != "UP":
        return failure(check, f"{chosen.name} is {chosen.fields['State']}", f"wait, or {choose}")
    if num_nodes > chosen.max_nodes:
        fewer = f"ask for fewer (launch.num_nodes), or {choose}"
        says = f"{chosen.name} has {chosen.num_nodes} nodes, {chosen.max_nodes} a job; {num_nodes} are asked for"
        return failure(check, says, fewer)
    gpus = chosen.gpus_per_node
    if gpus is None:
        return ok(check, f"{chosen.name} is up: {chosen.num_nodes} nodes")
    if slurm.gpus_per_node > gpus:
        says = f"{chosen.name} has {gpus} GPUs a node, {slurm.gpus_per_node} are asked for"
        return failure(check, says, f"lower launch.slurm.gpus_per_node, or {choose}")
    if not slurm.gpus_per_node and not slurm.exclusive:
        says = f"{chosen.name} has {gpus} GPUs a node, none is asked for"
        return warning(
            check, says, "set launch.slurm.gpus_per_node, or exclusive: some sites refuse jobs without a GPU"
        )
    return ok(check, f"{chosen.name} is up: {chosen.num_nodes} nodes, {gpus} GPUs each")


def account_finding(launch: LaunchConfig, associations: Answer, partitions: Answer) -> Finding:
    """Check that the user may charge the account, and that the partition takes it."""
    check, wanted = "account", launch.slurm.account
    if associations.error:  # a site may do without accounting
        return skipped(check, associations.error)
    accounts = list(dict.fromkeys(one.account for one in parse_associations(associations.text)))
    listed = ", ".join(accounts)
    if wanted is None:
        if not accounts:
            return warning(check, "none is set, and sacctmgr lists none of yours", "set launch.slurm.account")
        return ok(check, f"your default; yours are: {listed}")
    if wanted.lower() not in [account.lower() for account in accounts]:
        fix = f"set launch.slurm.account to one of: {listed}" if accounts else "ask your site for an account"
        return failure(check, f"{wanted} is not one of your accounts", fix)
    chosen = chosen_partition(launch.slurm, parse_partitions(partitions.text))
    if chosen is not None and not chosen.admits(wanted):
        return failure(check, f"partition {chosen.name} does not take {wanted}", "another account or partition")
    return ok(check, f"{wanted} is yours")


def walltime_finding(launch: LaunchConfig, partitions: Answer, associations: Answer) -> Finding:
    """Check that `launch.slurm.time_min` is within the limits of the partition and of the account."""
    check, slurm = "walltime", launch.slurm
    if partitions.error:
        return _unanswered(check, partitions)
    chosen = chosen_partition(slurm, parse_partitions(partitions.text))
    if chosen is None:
        return skipped(check, "the partition is not known")
    limits = {f"partition {chosen.name}": chosen.max_minutes}
    for association in parse_associations(associations.text):
        if association.is_charged(slurm, chosen):
            limits[f"account {association.account}"] = association.max_minutes
    for who, limit_min in limits.items():
        if limit_min is not None and slurm.time_min > limit_min:
            says = f"{slurm.time_min} min is more than {who} allows: {limit_min} min"
            return failure(check, says, f"set launch.slurm.time_min={limit_min}; a chain carries the run on")
    known = [limit for limit in limits.values() if limit is not None]
    return ok(check, f"{slurm.time_min} min; allowed are {f'{min(known)} min' if known else 'any'}")


def _unanswered(check: str, answer: Answer) -> Finding:
    return skipped(check, answer.error) if answer.is_absent else failure(check, answer.error, _ASK_AGAIN)
