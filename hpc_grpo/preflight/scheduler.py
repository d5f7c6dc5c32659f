"""Partition, account and walltime against what Slurm allows: one call each to scontrol and sacctmgr."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.slurm.partition import SHOW_PARTITIONS, chosen_partition, parse_partitions
from hpc_grpo.launch.place.slurm.text import minutes
from hpc_grpo.preflight.findings import Finding, failure, ok, skipped, warning
from hpc_grpo.system.commands import Answer, ask


@dataclass(frozen=True)
class Association:
    """An account that a user may charge, from `sacctmgr show assoc`; `max_minutes` None: no limit of its own."""

    account: str
    partition: str
    max_minutes: int | None


def ask_partitions() -> Answer:
    """All partitions; absent also where Slurm's tools are installed and belong to no cluster."""
    answer = ask(SHOW_PARTITIONS)
    return replace(answer, is_absent=answer.is_absent or _NO_CLUSTER in answer.error)


def ask_associations() -> Answer:
    words = [f"user={getpass.getuser()}", "format=Account,Partition,MaxWall"]
    return ask(["sacctmgr", "--noheader", "--parsable2", "show", "assoc", *words])


_NO_CLUSTER = "Could not establish a configuration source"


def parse_associations(text: str) -> list[Association]:
    """
    >>> parse_associations("proj.a|workq|1-00:00:00\\nproj.b||\\n")[0]
    Association(account='proj.a', partition='workq', max_minutes=1440)
    """
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    return [Association(account, partition, minutes(wall)) for account, partition, wall, *_ in rows]


def partition_finding(launch: LaunchConfig, answer: Answer, num_nodes: int) -> Finding:
    """Whether the partition exists, is up, and has so many nodes with so many GPUs."""
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
        fewer = f"ask for fewer (launch.slurm.num_nodes), or {choose}"
        says = f"{chosen.name} has {chosen.num_nodes} nodes, {chosen.max_nodes} a job; {num_nodes} are asked for"
        return failure(check, says, fewer)
    gpus = chosen.gpus_per_node
    if gpus is None:
        return ok(check, f"{chosen.name} is up: {chosen.num_nodes} nodes")
    if slurm.gpus_per_node > gpus:
        says = f"{chosen.name} has {gpus} GPUs a node, {slurm.gpus_per_node} are asked for"
        return failure(check, says, f"lower launch.slurm.gpus_per_node, or {choose}")
    if not slurm.gpus_per_node:
        says = f"{chosen.name} has {gpus} GPUs a node, none is asked for"
        return warning(check, says, "set launch.slurm.gpus_per_node; some sites refuse jobs without a GPU")
    return ok(check, f"{chosen.name} is up: {chosen.num_nodes} nodes, {gpus} GPUs each")


def account_finding(launch: LaunchConfig, associations: Answer, partitions: Answer) -> Finding:
    """Whether the account may be charged, and the partition takes it."""
    check, wanted = "account", launch.slurm.account
    if associations.error:  # a site may do without accounting
        return skipped(check, associations.error)
    accounts = list(dict.fromkeys(a.account for a in parse_associations(associations.text)))
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
    """Whether `launch.slurm.time_min` is within the limits of the partition and of the account."""
    check, slurm = "walltime", launch.slurm
    if partitions.error:
        return _unanswered(check, partitions)
    chosen = chosen_partition(slurm, parse_partitions(partitions.text))
    if chosen is None:
        return skipped(check, "the partition is not known")
    limits = {f"partition {chosen.name}": chosen.max_minutes}
    for found in parse_associations(associations.text):
        charged = slurm.account is not None and found.account.lower() == slurm.account.lower()
        if charged and found.partition in ("", chosen.name):
            limits[f"account {found.account}"] = found.max_minutes
    for who, limit_min in limits.items():
        if limit_min is not None and slurm.time_min > limit_min:
            says = f"{slurm.time_min} min is more than {who} allows: {limit_min} min"
            return failure(check, says, f"set launch.slurm.time_min={limit_min}; a chain carries the run on")
    known = [limit for limit in limits.values() if limit is not None]
    return ok(check, f"{slurm.time_min} min; allowed are {f'{min(known)} min' if known else 'any'}")


def _unanswered(check: str, answer: Answer) -> Finding:
    return skipped(check, answer.error) if answer.is_absent else failure(check, answer.error, _ASK_AGAIN)


_ASK_AGAIN = "try the same command by hand; the site's Slurm may be down"
