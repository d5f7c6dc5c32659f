"""The run directory as an agent's node has it: the head's, which the node sees too, or a disk of the node's own.

Consumes a `NodeSpec`; returns it with paths that hold on this node. Its digest of Ray's token, which the head writes
anew whenever it brings Ray up, is the proof: a node that reads that token sees the head's disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.protocol import NodeSpec, OwnDisk
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE, DISKS_VARIABLE
from hpc_grpo.run.files import digest_of, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import unpack_source

_SHOWS_UP_S = 90.0
"""A network file system may show the file of a minute ago."""


def take_run(spec: NodeSpec, own_dir: Path, goes_on: Callable[[], bool], shows_up_s: float = _SHOWS_UP_S) -> NodeSpec:
    """Return the spec for this node, on whose own disk what the head has sent of the run is put where it has one.

    `own_dir` is the agent's own folder; `goes_on` waits a moment, and is False once the supervisor ended the agent.
    Raises LaunchError where the head's disk must be seen and is not, or the node's own lacks what it must have;
    ConfigError for a folder that others may write.
    """
    if not spec.token_digest or _sees_head(spec):
        told = {name: value for name, value in spec.contract_env.items() if name != DISKS_VARIABLE}
        return replace(spec, own_disk=None, contract_env=told)
    if spec.own_disk is not None:
        return _with_own_disk(spec, spec.own_disk, own_dir)
    deadline = time.monotonic() + shows_up_s
    while time.monotonic() < deadline:
        if _sees_head(spec) or not goes_on():
            return spec
    found = "another file is" if Path(spec.token_path).exists() else "nothing is"
    raise LaunchError(
        f"launch.disks = shared, but node {spec.node} does not see the head's run directory: {found} at "
        f"{spec.token_path} there. Put run.root on a file system that all nodes see; or, where each has a disk of its "
        f"own, set launch.disks=private."
    )


def attempt_dir_here(own_dir: Path) -> Path:
    """Return where a node with a disk of its own keeps what belongs into the attempt's folder, until it is sent."""
    return own_dir / "attempt"


def _sees_head(spec: NodeSpec) -> bool:
    try:
        return digest_of(Path(spec.token_path).read_text()) == spec.token_digest
    except (OSError, UnicodeDecodeError):
        return False


def _with_own_disk(spec: NodeSpec, disk: OwnDisk, own_dir: Path) -> NodeSpec:
    if missing := [f"{key} = {path}" for key, path in disk.needs.items() if not Path(path).exists()]:
        raise LaunchError(
            f"Node {spec.node} has its own disk, without what the head has at: {'; '.join(missing)}. Copy it to "
            f"the same path on {spec.node}, or put it on a file system that all nodes see; a cache that a reward fills "
            f"may be empty there."
        )
    run, attempt_dir = RunDir(Path(disk.run_dir)), attempt_dir_here(own_dir)
    run.create()
    if disk.source:
        unpack_source(run, disk.source, disk.source_digest)
    token = own_dir / "token"
    write_atomic(token, disk.token, mode=0o600)
    log_dir = attempt_dir / "nodes" / spec.node
    log_dir.mkdir(parents=True)
    has_folder = Path(spec.working_dir).is_dir()
    return replace(
        spec,
        token_path=str(token),
        log_dir=str(log_dir),
        working_dir=spec.working_dir if has_folder else str(run.path),
        contract_env={**spec.contract_env, ATTEMPT_DIR_VARIABLE: str(attempt_dir)},
        templates_of="",  # they read the run's config, which is at the head
    )
