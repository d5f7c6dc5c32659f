"""Sections `placement` and `launch`: processes on each node, resources from Slurm, how nodes find each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from hpc_grpo.section import PathText, Section

_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*(:[0-9]{1,5})?")


class PlacementConfig(Section):
    learners_per_node: PositiveInt = Field(1, description="DeepSpeed learners on each node.")
    colocate: bool = Field(
        False,
        description="Let a learner and an engine share each GPU in turns. Engines free their memory during training.",
    )


class SlurmConfig(Section):
    partition: str | None = Field(
        None, description="Partition of the jobs. Default: the default partition of the site."
    )
    account: str | None = Field(None, description="Account to charge. Default: your default account.")
    time_min: PositiveInt = Field(60, description="Walltime in minutes.")
    gpus_per_node: NonNegativeInt = Field(0, description="GPUs to ask for on each node.")
    cpus_per_node: PositiveInt | None = Field(None, description="CPUs to request on each node. Default: Slurm's.")
    extra: dict[str, Any] = Field(
        {},
        description=(
            "Further sbatch options, KEY: VALUE. Examples: {exclusive: true} requests whole nodes; {network: job_vni} "
            "on Slingshot, which single-node steps may need to communicate."
        ),
    )
    max_job_chains: NonNegativeInt | None = Field(
        None,
        description="Largest number of follow-on jobs. 0: none. Default: no limit. In a .sh config: MAX_JOB_CHAINS.",
    )
    max_node_hours: PositiveFloat | None = Field(
        None, description="Node-hours that the run's jobs may use together. Default: no limit."
    )
    jobs_can_submit: bool = Field(
        True, description="Compute nodes have sbatch. false: submit queues all max_job_chains follow-on jobs at once."
    )

    @property
    def has_other_gpus(self) -> bool:
        """Return whether `extra` or whole nodes may give GPUs. Only the site knows how many."""
        of_extra = any(key == "gres" or key.startswith(("gpus", "tres")) for key in self.extra)
        return of_extra or (self.has_whole_nodes and not self.gpus_per_node)

    @property
    def has_whole_nodes(self) -> bool:
        return self.extra.get("exclusive", False) is not False


class ContainerConfig(Section):
    image: PathText = Field(
        description="Image that every node has. A path: a file for Apptainer or enroot, a root file system for podman."
    )
    engine: Literal["docker", "podman", "podman-hpc", "apptainer", "enroot"] = Field(
        "docker", description="Container program, found on the PATH of every node."
    )
    python: str = Field("python3", description="Python in the image, with all packages that hpc-grpo needs.")
    mounts: list[str] = Field(
        [],
        description=(
            "Further folders to mount, PATH or HOST:INSIDE[:ro]. Run, model, data, home and temp folders "
            "are always mounted."
        ),
    )
    args: list[str] = Field([], description="Further options for the container program when it starts the container.")

    @model_validator(mode="after")
    def _has_folder_for_image(self) -> ContainerConfig:
        if self.image.startswith("/") and self.engine in ("docker", "podman-hpc"):
            raise ValueError(
                f"launch.container.image = {self.image}: {self.engine} takes the name of an image, not a path. "
                "Give a name, or set launch.container.engine to podman (a root file system) or apptainer (a file)"
            )
        if self.engine == "enroot" and not self.image.startswith("/"):
            raise ValueError(
                f"launch.container.image = {self.image}: enroot takes the absolute path of a squashfs file. Make "
                "the file once with `enroot import -o FILE docker://...`"
            )
        return self


class RewardServerConfig(Section):
    command: list[str] = Field(
        min_length=1, description="Command and arguments of a server that rewards call. Starts on the head node."
    )
    health_url: str = Field(
        description="URL of the health check, such as http://127.0.0.1:8200/health. The server is up when it answers."
    )

    @field_validator("health_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url


class StageConfig(Section):
    """Copies on the local disk of each node, below launch.local_dir. Each node makes them once, before Ray starts."""

    environment: PathText | None = Field(
        None,
        description=(
            "Virtual environment, or its squashfs image, whose copy runs Ray and training. Default: "
            "launch.python, without a copy."
        ),
    )
    model: bool = Field(False, description="Learners read the weights of model.path from a copy.")


class LaunchConfig(Section):
    num_nodes: PositiveInt = Field(1, description="Nodes of the run. submit requests this many.")
    slurm: SlurmConfig = SlurmConfig()
    container: ContainerConfig | None = Field(
        None, description="Container around Ray and training on every node (image, engine, ...). Default: no container."
    )
    min_nodes: PositiveInt | None = Field(
        None,
        description=(
            "Smallest number of nodes to continue with after the loss of a node. Default: all; on Slurm a new "
            "job continues instead."
        ),
    )
    hosts: list[str] = Field(
        [], description="Hosts of the run, reached by ssh, as [user@]host[:port]. One is this machine, the head."
    )
    port: int = Field(
        6379, ge=1, le=65535, description="Port of the head, for workers of `hpc-grpo place pod` and `host`."
    )
    rejoin_s: Annotated[float, Field(ge=0)] = Field(
        120.0,
        description=(
            "`pod` and `host`: seconds that the head waits for a lost worker to return. The smallest wait is 20 s, so "
            "that the remaining workers can reconnect. At the start the head waits 15 times this, and at least 1800 s."
        ),
    )
    reward_server: RewardServerConfig | None = Field(
        None,
        description=(
            "A server that rewards call (command, health_url). Training waits until it is healthy, at most "
            "bringup_deadline_s."
        ),
    )
    ray_dashboard: bool = Field(
        False, description="Start Ray's dashboard on the head. `hpc-grpo cluster ray RUN dashboard` prints its address."
    )
    disks: Literal["shared", "private"] | None = Field(
        None,
        description=(
            "shared: every node sees the run directory. private: only the head's disk holds it, and "
            "other nodes send their files there. Default: the place decides; on Slurm shared."
        ),
    )
    interface: str | None = Field(
        None,
        description=(
            "Network interface between nodes for Ray, Gloo and NCCL (Isambard: hsn0). Default: the "
            "default route's interface."
        ),
    )
    python: PathText | None = Field(
        None,
        description="Python of the jobs, with hpc-grpo and Ray: an absolute path. Default: the Python that submits.",
    )
    modules: list[str] = Field([], description="Environment modules that the job loads.")
    setup_lines: list[str] = Field([], description="Shell lines that the job runs before the supervisor.")
    env: dict[str, str] = Field({}, description="Environment variables for Ray and the actors, NAME: VALUE.")
    pass_env: list[str] = Field([], description="Names of further environment variables that reach training.")
    local_dir: str | None = Field(
        None, description="Node-local folder for Ray's temp-dir and caches. Variables are expanded. Default: /tmp."
    )
    stage: StageConfig = StageConfig()
    object_store_gib: PositiveFloat = Field(
        1.0, description="Size of Ray's object store on each node, in GiB; at most 40% of free shared memory."
    )
    max_stalled_attempts: PositiveInt = Field(
        3, description="After this many attempts in a row without a new checkpoint, no further job starts."
    )
    bringup_deadline_s: PositiveFloat = Field(
        600.0, description="Seconds for all nodes and GPUs to join, and for the reward server to become healthy."
    )
    notify: list[str] = Field(
        [],
        description=(
            "Command and arguments that the job runs when the run is complete, its chain ends, or an attempt failed. "
            "HPC_GRPO_EVENT (complete, ended, retrying), HPC_GRPO_RUN and HPC_GRPO_WHY describe the event."
        ),
    )

    @field_validator("hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        if wrong := [host for host in hosts if not _HOST.fullmatch(host)]:
            raise ValueError(f"{wrong[0]!r} must be [user@]host[:port], such as ann@node1 or node2:2222")
        if len(set(hosts)) < len(hosts):
            raise ValueError("names a host twice")
        return hosts

    @model_validator(mode="before")
    @classmethod
    def _count_hosts(cls, values: Any) -> Any:
        """Set the number of nodes to the number of hosts, unless it is given."""
        hosts = values.get("hosts") if isinstance(values, dict) else None
        return {"num_nodes": len(hosts), **values} if hosts and isinstance(hosts, list) else values

    @model_validator(mode="after")
    def _one_node_a_host(self) -> LaunchConfig:
        if self.hosts and len(self.hosts) != self.num_nodes:
            raise ValueError(
                f"num_nodes = {self.num_nodes} must be the number of hosts, {len(self.hosts)}. Leave num_nodes out"
            )
        return self

    @field_validator("python")
    @classmethod
    def _whole_path(cls, python: str | None) -> str | None:
        if python is not None and not Path(python).is_absolute():
            raise ValueError(
                "must be an absolute path, because the job uses it unchanged. Give the full path of a Python, "
                "such as /projects/me/env/bin/python"
            )
        return python
