"""Let the environment variables through to Ray, the driver and the actors that have a reason to: an allow-list.

Everything not named here, in `launch.pass_env` or in `launch.env` stays behind: a job's environment carries
another scheduler's ranks, another user's proxies and another Python's path.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from hpc_grpo.errors import ConfigError
from hpc_grpo.section import VARIABLE

ALLOWED: dict[str, str] = {
    "PATH": "find python, ray and compilers",
    "HOME": "caches and credentials files live below it",
    "USER": "torch and triton name their caches after it; getpass fails without it",
    "LOGNAME": "same as USER",
    "SHELL": "subprocesses of user code",
    "LANG": "text encoding",
    "LANGUAGE": "text encoding",
    "TZ": "timestamps in logs agree with the user's",
    "TERM": "the console sink draws on a terminal",
    "COLUMNS": "width of the console sink",
    "NO_COLOR": "the user's wish for the console",
    "TMPDIR": "temporary files on the disk the site chose",
    "VIRTUAL_ENV": "tools that look for the environment",
    "CONDA_PREFIX": "libraries of a conda environment",
    "LD_LIBRARY_PATH": "libraries from modules: CUDA, NCCL, libfabric",
    "CUDA_HOME": "compiling kernels at run time",
    "CUDA_PATH": "same as CUDA_HOME",
    "CUDA_CACHE_PATH": "kernel cache off the shared file system",
    "CUDA_VISIBLE_DEVICES": "the GPUs of the allocation: Ray hands them out from this list",
    "CUDA_MODULE_LOADING": "start-up time of CUDA",
    "CUDA_DEVICE_ORDER": "GPUs are numbered as where the variable was set",
    "CUDA_DEVICE_MAX_CONNECTIONS": "how kernels and collectives overlap",
    "CUDA_LAUNCH_BLOCKING": "finding the kernel that failed",
    "CC": "the compiler of the modules",
    "CXX": "the compiler of the modules",
    "CPATH": "headers from modules: compiling kernels at run time",
    "LIBRARY_PATH": "libraries from modules: compiling kernels at run time",
    "SSL_CERT_FILE": "sites with their own certificate authority",
    "SSL_CERT_DIR": "sites with their own certificate authority",
    "REQUESTS_CA_BUNDLE": "sites with their own certificate authority",
    "LOCALDIR": "node-local disk of the site, used in launch.env and launch.local_dir",
    "SCRATCHDIR": "used in launch.env, as for HF_HOME, and by reward functions",
    "PROJECTDIR": "used in launch.env, and by reward functions",
    "DEBUG_RAY": "1: Ray's older debugger, on every node",
    "PYTHONUNBUFFERED": "logs appear when they are written",
    "PYTHONFAULTHANDLER": "stack dumps on a crash",
    "PYTHONDONTWRITEBYTECODE": "no writes into a shared installation",
}

ALLOWED_PREFIXES: dict[str, str] = {
    "LC_": "text encoding",
    "HF_": "Hugging Face caches, offline mode and token",
    "TRANSFORMERS_": "older names of the same",
    "TOKENIZERS_": "tokenizer threads",
    "WANDB_": "tracking, key included; passed on, never written",
    "NCCL_": "GPU collectives",
    "OFI_NCCL_": "the plugin between NCCL and libfabric",
    "FI_": "libfabric, the network below NCCL on Slingshot",
    "CXI_": "libcxi, below libfabric on Slingshot: CXI_FORK_SAFE, as Ray forks",
    "SLINGSHOT_": "the job's part of a Slingshot network (sbatch --network), without which libfabric is refused",
    "UCX_": "UCX, the network below NCCL's UCX plugin on InfiniBand",
    "IBV_": "verbs, the network below NCCL on InfiniBand: IBV_FORK_SAFE, as Ray forks",
    "RDMAV_": "an older name of the same",
    "MLX5_": "driver of InfiniBand adapters",
    "PSM2_": "Omni-Path, the network below libfabric",
    "PSM3_": "the same on Ethernet",
    "SHARP_": "NCCL's reductions inside InfiniBand switches",
    "GLOO_": "CPU collectives",
    "TP_": "tensorpipe's interface",
    "VLLM_": "engine settings",
    "OMP_": "threads and their binding",
    "KMP_": "threads of Intel's OpenMP, which vLLM has on CPUs",
    "MKL_": "threads",
    "OPENBLAS_": "threads",
    "TORCH": "torch, inductor and dynamo settings",
    "PYTORCH_": "allocator settings",
    "TRITON_": "kernel caches off the shared file system",
    "DS_": "DeepSpeed's accelerator",
    "RAY_": "Ray's own settings, but see DENIED",
    "HPC_GRPO_": "the contract between launching and training",
    "XDG_": "cache folders",
}

DENIED: dict[str, str] = {
    "RAY_ADDRESS": "would join another cluster; the supervisor sets its own",
    "RAY_TMPDIR": "the node's temp-dir is chosen and removed by its agent",
    "RAY_AUTH_TOKEN": "the run has its own token, in a file",
    "RAY_JOB_ID": "of the Ray job that started us, if any",
    "RAY_RAYLET_PID": "of the Ray job that started us, if any",
    "RAY_LD_PRELOAD_ON_WORKERS": "of the Ray job that started us, if any",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": "of the Ray job that started us, if any: its files are in that Ray",
    "RAY_RUNTIME_ENV_CREATE_WORKING_DIR": "of the Ray job that started us, if any",
    "HPC_GRPO_TOKEN": "nodes prove themselves to the head by it; training has no use for it",
    "LD_PRELOAD": "wrappers of the login shell break Ray's processes",
    "PYTHONPATH": "a module's Python 3.x packages shadow the environment's",
    "PYTHONHOME": "same as PYTHONPATH",
    "MASTER_ADDR": "left over from another launcher; DeepSpeed would believe it",
    "MASTER_PORT": "left over from another launcher; DeepSpeed would believe it",
    "RANK": "left over from another launcher; DeepSpeed would believe it",
    "LOCAL_RANK": "left over from another launcher; DeepSpeed would believe it",
    "WORLD_SIZE": "left over from another launcher; DeepSpeed would believe it",
    "ROCR_VISIBLE_DEVICES": "Slurm sets it beside CUDA_VISIBLE_DEVICES; Ray refuses to have both",
    "HIP_VISIBLE_DEVICES": "Slurm sets it beside CUDA_VISIBLE_DEVICES; Ray refuses to have both",
    "GPU_DEVICE_ORDINAL": "Slurm sets it beside CUDA_VISIBLE_DEVICES; Ray refuses to have both",
}

SCHEDULER_PREFIXES: dict[str, str] = {
    "SLURM": "training never reads the scheduler; libraries that do think they are an MPI rank",
    "SBATCH_": "options of another submission",
    "SRUN_": "options of another step",
}

DENIED_PREFIXES: dict[str, str] = {
    **SCHEDULER_PREFIXES,
    "PMI": "MPI start-up of the srun step",
    "PMIX_": "MPI start-up of the srun step",
    "OMPI_": "MPI start-up of the srun step",
    "RAY_EXPERIMENTAL_NOSET_": "`ray job submit` sets it: Ray would give every actor all of the node's GPUs",
}
"""These win over everything but an explicit `launch.env`."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def is_allowed(name: str, pass_env: Iterable[str] = ()) -> bool:
    """Return whether the variable gets through; `pass_env` adds names (`is_named`)."""
    if is_denied(name):
        return False
    if name in ALLOWED or name.startswith(tuple(ALLOWED_PREFIXES)):
        return True
    return is_named(name, pass_env)


def is_named(name: str, entries: Iterable[str]) -> bool:
    """Return whether an entry names the variable; one that ends in `*` is a prefix."""
    return any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in entries)


def unset(entries: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Return the names among the entries that `environ` does not have."""
    return [entry for entry in entries if not entry.endswith("*") and entry not in environ]


def is_denied(name: str) -> bool:
    """Return whether nothing but an explicit `launch.env` lets the variable through."""
    return name in DENIED or name.startswith(tuple(DENIED_PREFIXES))


def filtered(
    environ: Mapping[str, str],
    pass_env: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    nodes: Iterable[str] = (),
) -> dict[str, str]:
    """Return the environment of Ray, the driver and the actors on this node.

    `env` (launch.env) is set on top, with `$NAME` expanded from this node's own environment. Proxies stay
    behind unless `pass_env` names them; then `nodes` (names, addresses, networks of the run) are put into no_proxy.
    """
    wanted = list(pass_env)
    kept = {name: value for name, value in environ.items() if is_allowed(name, wanted)}
    for name, value in (env or {}).items():
        kept[name] = expand(value, environ)
    if any(name.lower() in PROXIES for name in kept):
        direct = [part for part in environ.get("no_proxy", environ.get("NO_PROXY", "")).split(",") if part]
        kept["no_proxy"] = kept["NO_PROXY"] = ",".join(dict.fromkeys([*direct, "localhost", "127.0.0.1", *nodes]))
    return kept


def job_environ(environ: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with `env` (launch.env) on top, as far as it can be known before the job runs.

    A site's variables may exist inside its jobs only; a value that names one is left out.
    """
    in_job = filtered(environ, (), env)
    return {**environ, **{name: value for name, value in in_job.items() if "$" not in value}}


def expand(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace `$NAME` and `${NAME}`; an unknown name stays as it is, since a site's may exist in its jobs only."""
    return VARIABLE.sub(lambda match: environ.get(match[1] or match[2], match[0]), text)


def check_resolved(env: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a value of launch.env that names a variable which this node does not have."""
    for name, text in env.items():
        if unknown := [
            found[1] or found[2] for found in VARIABLE.finditer(text) if (found[1] or found[2]) not in environ
        ]:
            raise ConfigError(
                f"launch.env.{name} = {text}: {unknown[0]} is not set on {socket.gethostname()}, where training runs. "
                f"Export it there (launch.setup_lines: ['export {unknown[0]}=...']), or write out what it stands for."
            )
