"""Sections `placement` and `launch`: what runs on each node, what to ask Slurm for, how nodes find each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from hpc_grpo.section import PathText, Section

_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*(:[0-9]{1,5})?")


class PlacementConfig(Section):
    learners_per_node: PositiveInt = Field(1, description="DeepSpeed learners on each node.")
    colocate: bool = Field(
        False,
        description="A learner and an engine share each GPU, in turn: engines give their memory back for the training.",
    )
    gpus: Literal["auto", "none"] = Field(
        "auto", description="auto: reserve GPUs where the cluster has any; none: CPUs alone."
    )
    bind_cores: bool = Field(
        True, description="Keep learners and engines on the cores near their GPUs, where a node is several NUMA nodes."
    )


class SlurmConfig(Section):
    partition: str | None = Field(None, description="Partition; null: the site's default.")
    account: str | None = Field(None, description="Account to charge; null: your default.")
    time_min: PositiveInt = Field(60, description="Walltime in minutes.")
    gpus_per_node: NonNegativeInt = Field(0, description="GPUs to ask for on each node.")
    cpus_per_node: PositiveInt | None = Field(None, description="CPUs to ask for on each node; null: the default.")
    exclusive: bool = Field(False, description="Whole nodes, shared with no other job: all that they have.")
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="Further sbatch options, KEY: VALUE, such as {network: job_vni} on Slingshot, where single-node "
        "steps else may not talk.",
    )
    max_job_chains: NonNegativeInt | None = Field(
        0, description="Follow-on jobs the run may use; null: until it is complete (MAX_JOB_CHAINS)."
    )
    max_node_hours: PositiveFloat | None = Field(
        None, description="Node-hours that the run's jobs may take together; null: no ceiling."
    )
    jobs_can_submit: bool = Field(
        True, description="Compute nodes have sbatch. false: submit queues all max_job_chains follow-on jobs at once."
    )

    @property
    def has_other_gpus(self) -> bool:
        """Tell whether GPUs may come with `extra` or with whole nodes: how many is the site's to know."""
        of_extra = any(key in ("gres", "exclusive") or key.startswith(("gpus", "tres")) for key in self.extra)
        return of_extra or (self.exclusive and not self.gpus_per_node)


class ContainerConfig(Section):
    image: PathText = Field(
        description="Image that every node has; a path is Apptainer's or enroot's file, podman's root file system."
    )
    engine: Literal["docker", "podman", "podman-hpc", "apptainer", "enroot"] = Field(
        "docker", description="Program that runs it, found on the PATH of every node."
    )
    python: str = Field("python3", description="Python in the image, with what hpc-grpo needs.")
    mounts: list[str] = Field(
        default_factory=list,
        description="Further folders, PATH or HOST:INSIDE[:ro]. Run, model, data, home and temp folders are there.",
    )
    args: list[str] = Field(default_factory=list, description="Further options of the engine's run (exec).")

    @model_validator(mode="after")
    def _has_folder_for_image(self) -> ContainerConfig:
        if self.image.startswith("/") and self.engine in ("docker", "podman-hpc"):
            raise ValueError(
                f"launch.container.image = {self.image}: {self.engine} takes the name of an image, not a path. Give "
                f"its name, or choose engine podman (a root file system) or apptainer (a file)"
            )
        if self.engine == "enroot" and not self.image.startswith("/"):
            raise ValueError(
                f"launch.container.image = {self.image}: enroot takes a squashfs file by its absolute path. Make it "
                f"once with `enroot import -o FILE docker://...`"
            )
        return self


class RewardServerConfig(Section):
    command: list[str] = Field(
        min_length=1, description="Command and arguments of a server that rewards ask, started beside the head."
    )
    health_url: str = Field(description="It is up once this address answers, such as http://127.0.0.1:8200/health.")
    deadline_s: PositiveFloat = Field(600.0, description="It must answer by then; else the run ends with 69.")

    @field_validator("health_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url


class StageConfig(Section):
    """Copies to each node's own disk, below launch.local_dir, made once a node before Ray starts there."""

    environment: PathText | None = Field(
        None,
        description="Virtual environment, or a squashfs image of one, whose copy runs Ray and training; null: "
        "launch.python, from where it is.",
    )
    model: bool = Field(False, description="Learners read the weights of model.path from a copy.")


class LaunchConfig(Section):
    num_nodes: PositiveInt = Field(1, description="Nodes of the run: those that submit asks for.")
    slurm: SlurmConfig = SlurmConfig()
    container: ContainerConfig | None = Field(
        None, description="Container around Ray and training on every node (image, engine, ...); null: none."
    )
    min_nodes: PositiveInt | None = Field(
        None, description="Nodes to go on with when others are lost; null: all of them, on Slurm else a new job."
    )
    hosts: list[str] = Field(
        default_factory=list,
        description="Hosts of the run, reached by ssh, as [user@]host[:port]; this machine, the head, is one of them.",
    )
    port: int = Field(
        6379, ge=1, le=65535, description="Port of the head that workers of `hpc-grpo place pod` and `host` dial."
    )
    rejoin_s: NonNegativeFloat = Field(
        120.0,
        description="`pod` and `host`: after a loss the head waits so long for workers to come back, but at least the "
        "20 s in which those that are left dial again. At the start it waits 15 times this, at least 1800 s.",
    )
    reward_server: RewardServerConfig | None = Field(
        None, description="A server that rewards ask (command, health_url, deadline_s), healthy before training."
    )
    ray_dashboard: bool = Field(
        False,
        description="Ray's dashboard on the head's loopback, behind Ray's token: `hpc-grpo cluster ray RUN dashboard`",
    )
    disks: Literal["shared", "private"] | None = Field(
        None,
        description="shared: every node sees the run directory; private: only the head's disk holds it, and what other "
        "nodes write of it goes there; null: as usual in the place, which for Slurm is shared.",
    )
    interface: str | None = Field(
        None,
        description="Network interface between nodes: Ray, Gloo, NCCL (Isambard: hsn0); null: the default route's.",
    )
    python: PathText | None = Field(
        None, description="Python of the jobs, with hpc-grpo and Ray: an absolute path; null: the one that submits."
    )
    modules: list[str] = Field(default_factory=list, description="Environment modules the job loads.")
    setup_lines: list[str] = Field(default_factory=list, description="Shell lines run before the supervisor.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables set for Ray and the actors.")
    pass_env: list[str] = Field(default_factory=list, description="Further variable names to let through.")
    local_dir: str | None = Field(
        None, description="Node-local folder for Ray's temp-dir and caches; null: /tmp. Variables are expanded."
    )
    templates: bool = Field(
        True,
        description="Nodes import what engines and learners need while Ray comes up, once for all of them; false: each "
        "imports for itself when it is started, also when a driver is started again.",
    )
    stage: StageConfig = StageConfig()
    keep_compiled: bool = Field(
        True,
        description="What engines compile is kept beside the runs, and later jobs begin with a copy on each node's own "
        "disk; false: vLLM, Triton and torch have it where they like, often in the home folder.",
    )
    object_store_gib: PositiveFloat = Field(1.0, description="Ray's object store on each node.")
    max_stalled_attempts: PositiveInt = Field(
        3, description="Jobs in a row without a new checkpoint after which a chain gives up."
    )
    bringup_deadline_s: PositiveFloat = Field(300.0, description="All nodes and GPUs must have joined by then.")
    notify: list[str] = Field(
        default_factory=list,
        description="Command and arguments, run by the job when the run is complete, its chain is over, or an attempt "
        "failed: HPC_GRPO_EVENT (complete, ended, retrying), HPC_GRPO_RUN and HPC_GRPO_WHY say what happened.",
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
        """Have as many nodes as hosts, where the number of nodes is not given."""
        if isinstance(values, dict) and values.get("hosts"):
            return {"num_nodes": len(values["hosts"]), **values}
        return values

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
                "must be an absolute path, as the job takes it literally. Give the whole path of a Python, such as "
                "/projects/me/env/bin/python"
            )
        return python
