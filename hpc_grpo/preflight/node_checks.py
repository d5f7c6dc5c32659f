"""Judge nodes one by one: pure functions from `NodeFacts` to findings, merged into one line for each check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_grpo.config.resources import object_store_bytes
from hpc_grpo.preflight.findings import Finding, Findings, failure, merged, ok, skipped, warning
from hpc_grpo.preflight.folders import NETWORK
from hpc_grpo.preflight.node_facts import NodeFacts
from hpc_grpo.types import GIB


@dataclass(frozen=True)
class NodeNeeds:
    """The needs of a run on each node.

    The job requests `gpus_per_node`; learners and engines reserve `worker_cpus` and `worker_gpus`. `device` is
    `model.device`. `store_gib` is the size of the weights in /dev/shm, None if the model is not known.
    """

    gpus_per_node: int = 0
    worker_cpus: float = 0.0
    worker_gpus: int = 0
    device: str = "cpu"
    store_gib: float | None = None
    object_store_gib: float = 1.0


_LEAST_FILES = 4096
_LEAST_PROCESSES = 4096
_LEAST_TEMP_GIB = 2.0
_MAX_IDLE_MIB = 1024
_MAX_IDLE_UTILIZATION = 10


def node_findings(facts: Sequence[NodeFacts], needs: NodeNeeds) -> Findings:
    """Return one finding for each check, over all nodes."""
    return {name: merged({node.node: check(node, needs) for node in facts}) for name, check in CHECKS.items()}


def interface(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    if node.interface_error:
        return failure(node.interface_error.rstrip("."), "set launch.interface to one that every node has")
    return ok(f"{node.interface} has {node.address}")


def host_name(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    if node.interface == "lo":
        return skipped("one node: no process looks up its name")
    says = f"resolves to {node.host_address}" if node.host_address else "does not resolve"
    if not node.host_address or node.host_address.startswith("127."):
        fix = "set launch.interface; programs that look up the name, such as reward servers, need the address"
        return warning(f"{says} on the node itself", fix)
    return ok(says)


def free_ports(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    if node.ports_error:
        return failure(node.ports_error, "end the processes that use them on the node, or exclude the node")
    return ok("a block of ports is free")


def temp_dir(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    elsewhere = "set launch.local_dir to a short, node-local folder such as /tmp"
    if node.temp_dir_error:
        return failure(node.temp_dir_error, elsewhere)
    if node.temp_dir_system in NETWORK:
        says = f"{node.temp_dir} is on {node.temp_dir_system}: Ray's sockets and caches must be node-local"
        return failure(says, elsewhere)
    if node.temp_dir_free_gib < _LEAST_TEMP_GIB:
        return warning(f"{node.temp_dir} has {node.temp_dir_free_gib:.1f} GiB free", f"make room, or {elsewhere}")
    return ok(f"{node.temp_dir} is node-local ({node.temp_dir_system}) and short enough")


def variables(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    """Check that the node has every variable that launch.env uses."""
    if node.env_error:
        return failure(node.env_error.rstrip("."), "set the variable in the job, or write out its value")
    return ok("every variable that it uses is set")


def shared_memory(node: NodeFacts, needs: NodeNeeds) -> Finding:
    """Check that /dev/shm has room for the weight store and Ray's object store."""
    free = node.shm_free_gib
    objects = object_store_bytes(needs.object_store_gib, free * GIB) / GIB
    need = objects + (needs.store_gib or 0.0)
    if need > free:
        fix = "remove your leftovers in /dev/shm, lower launch.object_store_gib, or request more memory"
        return failure(f"{free:.1f} GiB free, the run needs {need:.1f}", fix)
    if needs.store_gib is None:
        return ok(f"{_rounded(free)} GiB free; Ray takes {objects:.1f}, the size of the weights is not known")
    return ok(f"{_rounded(free)} GiB free; the run needs {need:.1f}")


def limits(node: NodeFacts, needs: NodeNeeds) -> Finding:
    """Check the hard limits of Ray's processes, and their soft limit of open files."""
    found = node.limits
    for name, least in (("nofile", _LEAST_FILES), ("nproc", _LEAST_PROCESSES)):
        if 0 <= found.get(name, -1) < least:
            says = f"ulimit -H {name} is {found[name]}, Ray and vLLM want at least {least}"
            return failure(says, "ask your site to raise it, or try ulimit before sbatch: some sites pass limits on")
    if found.get("as", -1) >= 0:
        return failure(f"address space is limited to {found['as']} bytes", "ulimit -v unlimited before sbatch")
    if 0 <= node.soft_nofile < _LEAST_FILES:
        says = f"ulimit -n is {node.soft_nofile} open files, Ray wants at least {_LEAST_FILES}"
        return warning(says, f"launch.setup_lines: [ulimit -n {_LEAST_FILES}]")
    if node.num_gpus and node.wheel_cuda and found.get("memlock", -1) >= 0:
        says = f"locked memory is limited to {found['memlock']} bytes: RDMA and pinned memory may fail"
        return warning(says, "ulimit -l unlimited in launch.setup_lines, or ask your site")
    return ok("files, processes and memory suffice")


def cpus(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    """Check that processes on the node may use all CPUs of the job there."""
    expected = min(node.num_cpus, node.num_machine_cpus)
    if node.num_usable_cpus < expected:
        says = f"pinned to {node.num_usable_cpus} of {expected} CPUs"
        return failure(says, "unset SLURM_CPU_BIND and SLURM_CPUS_PER_TASK; set launch.slurm.cpus_per_node")
    return ok(f"{expected} usable")


def placement(node: NodeFacts, needs: NodeNeeds) -> Finding:
    """Check that learners and engines fit on the job's part of the node."""
    fewer = "lower engine.engines_per_node, or raise launch.slurm"
    if needs.worker_cpus > node.num_cpus:
        says = f"learners and engines reserve {needs.worker_cpus:g} CPUs, the job has {node.num_cpus}"
        return failure(says, f"{fewer}.cpus_per_node; without a request Slurm gives one CPU")
    if (node.num_gpus or node.gpus) and needs.worker_gpus > node.num_gpus:
        says = f"learners and engines reserve {needs.worker_gpus} GPUs, the job has {node.num_gpus}"
        return failure(says, f"{fewer}.gpus_per_node")
    return ok(f"learners and engines fit on {node.num_cpus} CPUs and {node.num_gpus} GPUs")


def gpus(node: NodeFacts, needs: NodeNeeds) -> Finding:
    """Check that the requested number of GPUs is visible and idle."""
    if node.has_rocm and not node.gpus:
        says, fix = "AMD GPUs (ROCm) are not supported", "a partition with NVIDIA GPUs, or model.device=cpu"
        needs_gpus = needs.device == "cuda" or needs.gpus_per_node or node.num_gpus
        return failure(says, fix) if needs_gpus else warning(f"{says}: the run is on CPUs", fix)
    if needs.device == "cuda" and not node.gpus:
        return failure(f"model.device = cuda, but {node.gpus_error or 'no GPU'}", "a partition with GPUs")
    if node.gpus_error and not (node.num_gpus or needs.gpus_per_node) and needs.device == "auto":
        says = f"{node.gpus_error}: without an NVIDIA driver the run computes on CPUs"
        return warning(says, "choose it by model.device=cpu, or request GPUs")
    if node.gpus_error and not (node.num_gpus and node.wheel_cuda):
        return skipped(f"{node.gpus_error}, and torch is built for CPUs or no GPU is requested")
    if node.gpus_error:
        return failure(node.gpus_error, "exclude the node (launch.slurm.extra.exclude) and tell your site")
    if len(node.gpus) < max(needs.gpus_per_node, node.num_gpus):
        says = f"{len(node.gpus)} of {max(needs.gpus_per_node, node.num_gpus)} GPUs are visible"
        return failure(says, "correct launch.slurm.gpus_per_node, or exclude the node (launch.slurm.extra.exclude)")
    busy = [gpu for gpu in node.gpus if gpu.used_mib > _MAX_IDLE_MIB or gpu.utilization > _MAX_IDLE_UTILIZATION]
    if busy:
        listed = ", ".join(f"GPU {gpu.index} holds {gpu.used_mib} MiB at {gpu.utilization}%" for gpu in busy)
        return failure(f"not idle: {listed}", "end your leftovers there (nvidia-smi), or exclude the node")
    return ok(f"{len(node.gpus)} {node.gpus[0].name} visible and idle" if node.gpus else "none")


def cuda(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    """Check that the driver runs the CUDA that torch was built for."""
    if node.wheel_cuda is None:
        return failure("torch is not installed", 'pip install -e ".[gpu]", or ".[cpu]" without GPUs')
    if not node.gpus:
        return skipped("no GPU was seen")
    if not node.wheel_cuda:
        return failure("torch is a CPU build on a node with GPUs", 'pip install -e ".[gpu]" in a fresh .venv')
    if not node.driver_cuda:
        return warning("nvidia-smi does not say which CUDA the driver runs", "compare it with torch's CUDA by hand")
    if int(node.wheel_cuda.partition(".")[0]) > int(node.driver_cuda.partition(".")[0]):
        says = f"torch is built for CUDA {node.wheel_cuda}, the driver runs up to {node.driver_cuda}"
        fix = (
            f"put NVIDIA's cuda-compat for CUDA {node.wheel_cuda} first in launch.env.LD_LIBRARY_PATH (data-centre "
            f"GPUs only), run in a container that has it (launch.container.image), or install torch and vLLM for CUDA "
            f"{node.driver_cuda.partition('.')[0]}"
        )
        return failure(says, fix)
    return ok(f"driver runs CUDA {node.driver_cuda}, torch is built for {node.wheel_cuda}")


def compiler(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    """Check that Triton can compile on a node with GPUs: vLLM and DeepSpeed need that."""
    if not node.gpus:
        return skipped("no GPU was seen")
    if node.cannot_compile:
        fix = "launch.modules: add the site's compiler, such as gcc-native; for Python.h a Python with headers"
        return failure(f"Triton cannot compile kernels: {node.cannot_compile}", fix)
    return ok("a C compiler and Python.h are there")


def compile_caches(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    """Check that no compile cache is shared between nodes."""
    shared = [f"{name} ({kind})" for name, kind in node.caches.items() if kind in NETWORK]
    if shared:
        fix = "in launch.env, give node-local folders: shared ones cause stale handles and corruption"
        return warning(f"on a shared file system: {', '.join(shared)}", fix)
    return ok("node-local")


def slingshot(node: NodeFacts, _needs: NodeNeeds) -> Finding:
    """On a Slingshot network, check the setting without which Ray hangs, and the step's part of the network."""
    if not node.has_slingshot:
        return skipped("no such network here")
    if node.match_mode != "software":
        says = f"FI_CXI_RX_MATCH_MODE is {node.match_mode or 'not set'}: hardware matching hangs under Ray"
        return warning(says, "FI_CXI_RX_MATCH_MODE: software in launch.env")
    if not node.has_vni and node.interface != "lo":
        says = "SLINGSHOT_VNIS is not set: on some sites, steps on two nodes cannot talk over libfabric"
        return warning(says, "launch.slurm.extra.network=job_vni, if NCCL finds no provider or is refused")
    return ok("message matching is in software, and the job has its part of the network")


CHECKS: dict[str, Callable[[NodeFacts, NodeNeeds], Finding]] = {
    "interface": interface,
    "host name": host_name,
    "free ports": free_ports,
    "temp folder": temp_dir,
    "launch.env": variables,
    "/dev/shm": shared_memory,
    "limits": limits,
    "cpus": cpus,
    "placement": placement,
    "gpus": gpus,
    "cuda": cuda,
    "compiler": compiler,
    "compile caches": compile_caches,
    "slingshot": slingshot,
}


def _rounded(gib: float) -> str:
    """Round coarsely, so that equal nodes read the same."""
    return f"{gib:.0f}" if gib >= 2 else f"{gib:.1f}"
