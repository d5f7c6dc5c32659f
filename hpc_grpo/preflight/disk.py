"""Check that what a run writes has room below run.root: a full disk or quota stops it in the middle of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.disk import DiskBudget, read_disk
from hpc_grpo.plan.fit import plan_of
from hpc_grpo.plan.memory import GH200
from hpc_grpo.preflight.findings import Context, Finding, failure, ok, skipped, warning
from hpc_grpo.types import GIB

_FIX = (
    "make room (hpc-grpo du, hpc-grpo clean RUN), lower checkpoint.keep_last or checkpoint.keep_exports, or set "
    "run.root to a larger file system"
)


def refuse_full_disk(config: Config) -> None:
    """Raise ConfigError where the checkpoints and exports of the run would not fit, or nobody knows whether they do.

    A model that is not here is not judged.
    """
    disk = _disk(config, os.environ)
    if disk is not None and disk.is_too_large:
        raise ConfigError(f"run.root = {config.run.root}: {_sure(disk)}. To go on, {_FIX}.")


def disk_finding(context: Context) -> Finding:
    check, config = "disk", context.config
    if config is None:
        return skipped(check, context.why_no_config)
    try:
        disk = _disk(config, context.environ)
    except ConfigError as error:
        return failure(check, str(error), _FIX)
    if disk is None:
        return skipped(check, "the model is not on this machine, or is none that can be planned")
    return judged_disk(disk)


def judged_disk(disk: DiskBudget) -> Finding:
    """Judge a run's budget: what is sure must fit, what is estimated at its most should."""
    check, room = "disk", f"{disk.room.num_bytes / GIB:,.0f} GiB {disk.room.limit} in {disk.folder}"
    if disk.is_too_large:
        return failure(check, _sure(disk), _FIX)
    if not disk.fits:
        return warning(check, f"up to {disk.num_bytes / GIB:,.0f} GiB of {room}, if completions get long", _FIX)
    if disk.has_too_many_files:
        says = f"the run makes about {disk.num_files:,} files, and {disk.room.num_files:,} files are"
        return warning(check, f"{says} {disk.room.files_limit} in {disk.folder}", _FIX)
    return ok(check, f"up to {disk.num_bytes / GIB:,.0f} GiB of {room}")


def _sure(disk: DiskBudget) -> str:
    parts = ", ".join(f"{part.name} {part.num_bytes / GIB:,.0f} GiB ({part.formula})" for part in disk.sure)
    return f"the run keeps {parts}, and {disk.room.num_bytes / GIB:,.0f} GiB are {disk.room.limit} in {disk.folder}"


def _disk(config: Config, environ: Mapping[str, str]) -> DiskBudget | None:
    """Return the budget; None for a model that is not here. Raises ConfigError where the disk does not say its room."""
    try:
        plan = plan_of(config, environ, GH200)
    except ConfigError:
        return None  # the check of the model says why
    return read_disk(plan)
