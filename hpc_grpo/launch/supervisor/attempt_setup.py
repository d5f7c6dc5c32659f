"""The setup of an attempt: everything that is fixed before its first process, and the data for its nodes and driver."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from hpc_grpo import __version__
from hpc_grpo.config import Config, LaunchConfig
from hpc_grpo.config.load import texts_in
from hpc_grpo.launch.agent.protocol import NodeSpec, OwnDisk, Stage
from hpc_grpo.launch.agent.stage import version_of
from hpc_grpo.launch.environment import job_environ
from hpc_grpo.launch.place.base import Allocation, Place
from hpc_grpo.launch.place.container import Container
from hpc_grpo.run import contract
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.compiled import archive_of
from hpc_grpo.run.files import digest_of, read_record
from hpc_grpo.run.frozen_config import flat, read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import packed_source, sums_digest
from hpc_grpo.system.hugging_face import find_model
from hpc_grpo.system.processes import ProcessIdentity


@dataclass(frozen=True)
class AttemptSetup:
    """Data that all parts of an attempt need.

    `container` is that of all training programs. `has_templates`: the driver's actors are forks of templates. `stage`:
    copies that nodes make on their own disks. `nonce`, new for each start of Ray, makes folder names unguessable.
    """

    run: RunDir
    launch: LaunchConfig
    place: Place
    allocation: Allocation
    number: int
    working_dir: Path
    container: Container | None = None
    has_templates: bool = False
    stage: Stage = field(default_factory=Stage)
    nonce: str = field(default_factory=lambda: secrets.token_urlsafe(6))

    @property
    def dir(self) -> Path:
        return self.run.attempt(self.number, self.allocation.job_id)

    @property
    def max_stalled_restarts(self) -> int:
        """Return how many tries in a row without a new checkpoint are retried. 0 for no retry: a user watches."""
        return 0 if self.place.is_attended else 1

    @property
    def has_private_disks(self) -> bool:
        return len(self.allocation.nodes) > 1 and (self.launch.disks or self.place.disks) == "private"

    @property
    def ray_address_file(self) -> Path:
        """The file in which the driver finds Ray's address."""
        return self.dir / "ray_address"

    def new_record(self, first_step: int) -> AttemptRecord:
        return AttemptRecord(
            attempt=self.number,
            job_id=self.allocation.job_id,
            source=self.place.name,
            nodes=list(self.allocation.nodes),
            started_at=time.time(),
            ends_at=self.allocation.ends_at,
            supervisor_pid=os.getpid(),
            first_step=first_step,
        )

    def contract_environment(self) -> dict[str, str]:
        """Return the variables that the driver and its actors read."""
        told = {
            contract.ATTEMPT_VARIABLE: str(self.number),
            contract.ATTEMPT_DIR_VARIABLE: str(self.dir),
            contract.RAY_ADDRESS_FILE_VARIABLE: str(self.ray_address_file),
            contract.NUM_NODES_VARIABLE: str(len(self.allocation.nodes)),
        }
        if self.max_stalled_restarts > 0:
            told[contract.KEEPS_ENGINES_VARIABLE] = "1"
        if self.has_private_disks:
            told[contract.DISKS_VARIABLE] = "private"
        if self.allocation.ends_at is not None:
            told[contract.ENDS_AT_VARIABLE] = f"{self.allocation.ends_at:.0f}"
        return told

    def node_spec(self, node: str, head_address: str | None) -> NodeSpec:
        """Return the spec for the agent of `node`. `head_address`: "" for the head, None until the head has one."""
        launch, nodes = self.launch, self.allocation.nodes
        return NodeSpec(
            node=node,
            # The index, since some nodes share their /tmp.
            tag=f"{self.allocation.job_id}-{nodes.index(node)}-{self.nonce}",
            head_address=head_address,
            token_path=str(self.run.secret),
            log_dir=str(self.dir / "nodes" / node),
            working_dir=str(self.working_dir),
            interface=launch.interface or self.place.interface(node),
            loopback=len(nodes) == 1,
            local_dir=launch.local_dir,
            object_store_gib=launch.object_store_gib,
            env=launch.env,
            pass_env=launch.pass_env,
            contract_env=self.contract_environment(),
            nodes=list(nodes),
            container=self.container,
            environ={} if node == nodes[0] else self.place.carried_environment(os.environ),
            version=__version__,
            dashboard_port=self.place.dashboard_port if launch.ray_dashboard and head_address == "" else None,
            templates_of=str(self.run.path) if self.has_templates else "",
            stage=self.stage,
            supervisor=ProcessIdentity.of_this_process(),
        )

    def joining_spec(self, node: str) -> NodeSpec:
        """Return the spec for the agent of a node other than the head, once the head has written Ray's token."""
        token, own_disk = self.run.secret.read_text(), None
        if self.has_private_disks:
            begun_at = read_record(self.run.source, lambda values: float(values["created_at"]))
            needs = needed_everywhere(read_config(self.run), inf if begun_at is None else begun_at)
            own_disk = OwnDisk(str(self.run.path), token, packed_source(self.run), sums_digest(self.run), needs)
        return replace(self.node_spec(node, None), token_digest=digest_of(token), own_disk=own_disk)


def stage_of(config: Config, working_dir: Path, environ: Mapping[str, str]) -> Stage:
    """Return the copies that a run's nodes make on their own disks. Raises ConfigError for a model that is not here."""
    asked, weights = config.launch.stage, ""
    if asked.model:
        beside = working_dir / config.model.path
        path = str(beside) if beside.is_dir() else config.model.path
        weights = str(find_model(path, job_environ(environ, config.launch.env)).absolute())
    compiled = str(archive_of(config)) if config.needs.rollouts else ""
    environment = str(working_dir / asked.environment) if asked.environment else ""
    return Stage(environment, weights, compiled, version_of(*map(Path, filter(None, [environment, weights]))))


def needed_everywhere(config: Config, begun_at: float) -> dict[str, str]:
    """Map config keys to local files and folders that actors on every node read: models and files of rewards.

    A reward's file that changed after the run began (`begun_at`, unix seconds) is a cache that the reward writes.
    """
    values = flat(config.model_dump(mode="json", exclude={"run", "launch"}))
    needed = {key: path for key, path in config.models.items() if _is_here(path)}
    for key, value in values.items():
        if ".args." in key:
            paths = [path for path in texts_in(value) if _is_here(path) and Path(path).stat().st_mtime < begun_at]
            needed |= {key if len(paths) == 1 else f"{key}.{index}": path for index, path in enumerate(paths)}
    return needed


def _is_here(path: str) -> bool:
    # Not Path.exists: it raises for text that is longer than a path may be, such as a prompt "/no_think ...".
    return path.startswith("/") and os.path.exists(path)  # noqa: PTH110
