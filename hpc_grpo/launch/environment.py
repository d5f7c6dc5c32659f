"""Pass environment variables to Ray, the driver and the actors only with a reason: an allow-list.

Drops all variables not named here, in `launch.pass_env` or in `launch.env`: a job's environment holds another
scheduler's ranks, another user's proxies and another Python's path.
"""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.compiled import CACHES
from hpc_grpo.run.contract import COMPILED_ARCHIVE_VARIABLE, COMPILED_DIR_VARIABLE, WEIGHTS_DIR_VARIABLE
from hpc_grpo.section import VARIABLE
from hpc_grpo.system.secret import MASK, is_secret, secret_keys, without_secrets

ALLOWED: dict[str, str] = {
    "PATH": "find python, ray and compilers",
    "HOME": "caches and credentials files live below it",
    "USER": "torch and triton name their caches after it; getpass fails without it",
    "LOGNAME": "same as USER",
    "SHELL": "subprocesses of user code",
    **dict.fromkeys(("LANG", "LANGUAGE"), "text encoding"),
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
    "CUDA_DEVICE_ORDER": "the order in which CUDA numbers the GPUs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "how kernels and collectives overlap",
    "CUDA_LAUNCH_BLOCKING": "finding the kernel that failed",
    **dict.fromkeys(("CC", "CXX"), "the compiler of the modules"),
    "CPATH": "headers from modules: compiling kernels at run time",
    "LIBRARY_PATH": "libraries from modules: compiling kernels at run time",
    **dict.fromkeys(
        ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"), "sites with their own certificate authority"
    ),
    "LOCALDIR": "node-local disk of the site, used in launch.env and launch.local_dir",
    "SCRATCHDIR": "used in launch.env, for example for HF_HOME, and by reward functions",
    "PROJECTDIR": "used in launch.env, and by reward functions",
    "DEBUG_RAY": "1: Ray's older debugger, on every node",
    "PYTHONUNBUFFERED": "logs appear when they are written",
    "PYTHONFAULTHANDLER": "stack dumps on a crash",
    "PYTHONDONTWRITEBYTECODE": "no writes into a shared installation",
    "LC_*": "text encoding",
    "HF_*": "Hugging Face caches, offline mode and token",
    "TRANSFORMERS_*": "older names of HF_*",
    "TOKENIZERS_*": "tokenizer threads",
    "WANDB_*": "tracking, key included; passed on, never written",
    "NCCL_*": "GPU collectives",
    "OFI_NCCL_*": "the plugin between NCCL and libfabric",
    "FI_*": "libfabric, the network below NCCL on Slingshot",
    "CXI_*": "libcxi, below libfabric on Slingshot: CXI_FORK_SAFE, because Ray forks",
    "SLINGSHOT_*": "the job's part of a Slingshot network (sbatch --network); libfabric fails without it",
    "UCX_*": "UCX, the network below NCCL's UCX plugin on InfiniBand",
    "IBV_*": "verbs, the network below NCCL on InfiniBand: IBV_FORK_SAFE, because Ray forks",
    "RDMAV_*": "older names of IBV_*",
    "MLX5_*": "driver of InfiniBand adapters",
    "PSM2_*": "Omni-Path, the network below libfabric",
    "PSM3_*": "PSM3, the network below libfabric on Ethernet",
    "SHARP_*": "NCCL's reductions inside InfiniBand switches",
    "GLOO_*": "CPU collectives",
    "TP_*": "tensorpipe's interface",
    "VLLM_*": "engine settings",
    "OMP_*": "threads and their binding",
    "KMP_*": "threads of Intel's OpenMP, which vLLM has on CPUs",
    **dict.fromkeys(("MKL_*", "OPENBLAS_*"), "threads"),
    "TORCH*": "torch, inductor and dynamo settings",
    "PYTORCH_*": "allocator settings",
    "TRITON_*": "kernel caches off the shared file system",
    "DS_*": "DeepSpeed's accelerator",
    "RAY_*": "Ray's own settings, except for a few",
    "HPC_GRPO_*": "the contract between launching and training",
    "XDG_*": "cache folders",
}
"""Variable -> reason. A name that ends in `*` is a prefix."""

SCHEDULER: dict[str, str] = {
    "SLURM*": "training never reads the scheduler; libraries that do think they are an MPI rank",
    "SBATCH_*": "options of another submission",
    "SRUN_*": "options of another step",
}

DENIED: dict[str, str] = {
    "RAY_ADDRESS": "would join another cluster; the supervisor sets its own",
    "RAY_TMPDIR": "the node's temp-dir is chosen and removed by its agent",
    "RAY_AUTH_TOKEN": "the run has its own token, in a file",
    **dict.fromkeys(
        ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_RUNTIME_ENV_CREATE_WORKING_DIR"),
        "of another Ray job, which started hpc-grpo",
    ),
    "RAY_JOB_CONFIG_JSON_ENV_VAR": "of another Ray job, which started hpc-grpo and has its own files",
    "HPC_GRPO_TOKEN": "proves a node to the head; training does not need it",
    "LD_PRELOAD": "wrappers of the login shell break Ray's processes",
    "PYTHONPATH": "a module's Python 3.x packages shadow the environment's",
    "PYTHONHOME": "same as PYTHONPATH",
    **dict.fromkeys(
        ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
        "left over from another launcher; DeepSpeed would use it",
    ),
    **dict.fromkeys(
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        "Slurm sets it beside CUDA_VISIBLE_DEVICES; Ray refuses both together",
    ),
    **SCHEDULER,
    **dict.fromkeys(("PMI*", "PMIX_*", "OMPI_*"), "MPI start-up of the srun step"),
    "RAY_EXPERIMENTAL_NOSET_*": "`ray job submit` sets it: Ray would give every actor all of the node's GPUs",
}
"""Variable -> why it is dropped. Only `launch.env` can set such a variable."""

RAY_SETTINGS: dict[str, tuple[str, str]] = {
    "RAY_AUTH_MODE": ("token", "without a token, anybody on the shared network could run code as you"),
    "RAY_USAGE_STATS_ENABLED": ("0", "Ray sends no usage statistics"),
    "RAY_enable_metrics_collection": ("0", "the exporter listens on 0.0.0.0 and asks for no token"),
    "DASHBOARD_METRIC_PORT": ("-1", "no exporter of the dashboard; Ray has no switch, but survives an invalid port"),
    "RAY_prestart_worker_first_driver": ("0", "else Ray starts an idle Python per CPU: 288 on a GH200 node"),
    "RAY_grpc_client_keepalive_time_ms": ("20000", "time until Ray probes a silent connection, by default 300 s"),
    "RAY_grpc_client_keepalive_timeout_ms": ("40000", "time that Ray waits for the probe's answer, by default 120 s"),
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": ("0", "Ray Serve has no replicas to move; teardown would wait for it"),
    "RAY_DISABLE_IMPORT_WARNING": ("1", "the warning is not for the user"),
    "RAY_IGNORE_UNHANDLED_ERRORS": ("1", "the driver reports the first error; Ray would print the others after it"),
}
"""Variable -> (value, reason)."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def is_allowed(name: str, pass_env: Iterable[str] = ()) -> bool:
    """Return whether the variable gets through; `pass_env` adds names (`is_named`)."""
    return is_named(name, [*ALLOWED, *pass_env]) and not is_denied(name)


def is_named(name: str, entries: Iterable[str]) -> bool:
    """Return whether an entry names the variable. An entry that ends in `*` is a prefix."""
    return any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in entries)


def is_denied(name: str) -> bool:
    """Return whether nothing but an explicit `launch.env` lets the variable through."""
    return is_named(name, DENIED)


def filtered(
    environ: Mapping[str, str],
    pass_env: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    nodes: Iterable[str] = (),
) -> dict[str, str]:
    """Return the environment of Ray, the driver and the actors on this node.

    `env` (launch.env) is set on top, with `$NAME` expanded from this node's environment. Proxies are dropped unless
    `pass_env` or `env` names them. In that case no_proxy gets the `nodes` (names, addresses, networks of the run).
    """
    kept = {name: value for name, value in environ.items() if is_allowed(name, pass_env)}
    kept |= {name: expand(value, environ) for name, value in (env or {}).items()}
    if any(name.lower() in PROXIES for name in kept):
        direct = [part for part in environ.get("no_proxy", environ.get("NO_PROXY", "")).split(",") if part]
        kept["no_proxy"] = kept["NO_PROXY"] = ",".join(dict.fromkeys([*direct, "localhost", "127.0.0.1", *nodes]))
    return kept


def job_environ(environ: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with `env` (launch.env) on top, as far as it is known before the job runs.

    Some of a site's variables exist only in its jobs. Values that use an unknown variable are left out.
    """
    in_job = filtered(environ, (), env)
    return {**environ, **{name: value for name, value in in_job.items() if "$" not in value}}


def expand(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace `$NAME` and `${NAME}`. An unknown name stays unchanged: it may exist only in a site's jobs."""
    return VARIABLE.sub(lambda match: environ.get(match[1] or match[2], match[0]), text)


def check_resolved(env: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a value of launch.env with a variable that this node does not have."""
    for name, text in env.items():
        named = [found[1] or found[2] for found in VARIABLE.finditer(text)]
        if unknown := [variable for variable in named if variable not in environ]:
            raise ConfigError(
                f"launch.env.{name} = {text}: {unknown[0]} is not set on {socket.gethostname()}, where training runs. "
                f"Export it there (launch.setup_lines: ['export {unknown[0]}=...']), or write its value in launch.env."
            )


Outcome = Literal["passed", "set", "dropped"]

ON_NODE = "(chosen on each node)"

NODE_VALUES: dict[str, str] = {
    "RAY_AUTH_TOKEN_PATH": "the run's own token, in a file of mode 0600",
    "VLLM_HOST_IP": "the node's address on the interface between nodes",
    "GLOO_SOCKET_IFNAME": "the interface between nodes: launch.interface, else that of the default route",
    "HPC_GRPO_SHM_DIR": "the run's own folder in shared memory",
    "HPC_GRPO_ENGINE_PYTHON": "how Ray starts an engine: as a fork of the node's template",
    "HPC_GRPO_LEARNER_PYTHON": "how Ray starts a learner: in the same way",
    COMPILED_DIR_VARIABLE: "the node's own folder of compiled kernels (docs/launching.md)",
    COMPILED_ARCHIVE_VARIABLE: "the archive of these compiled files, for later jobs",
    WEIGHTS_DIR_VARIABLE: "the node's own copy of model.path (launch.stage.model)",
    "TMPDIR": "the node's temp-dir, which is removed after the attempt",
}
"""Variable -> a description of the value that ray_environment sets on every node, overriding the environment."""

DEFAULTS: dict[str, tuple[str, str]] = {
    "OMP_NUM_THREADS": ("1", "many processes share a node"),
    **dict.fromkeys(CACHES, (ON_NODE, "compile caches are node-local (docs/launching.md)")),
    "NCCL_SOCKET_IFNAME": (ON_NODE, "the interface between nodes; NCCL may choose another one"),
}
"""Variable -> (value, reason). ray_environment sets it unless the environment or launch.env has it."""

_LEAST_SECRET_LENGTH = 4
_SHOWN_VALUE_LENGTH = 48


@dataclass(frozen=True)
class Variable:
    """A variable and what happens to it. `value` is what reaches the actors: None if dropped, MASK for a secret."""

    name: str
    outcome: Outcome
    reason: str
    is_secret: bool
    value: str | None


def environment_report(
    environ: Mapping[str, str], launch: LaunchConfig, engine_settings: Mapping[str, str] | None = None
) -> list[Variable]:
    """Report on the variables of `environ`, launch.env and hpc-grpo. Engines set `engine_settings` themselves."""
    kept = {name: value for name, (value, _) in DEFAULTS.items()}
    kept |= filtered(environ, launch.pass_env, launch.env, ["(names and network of the run's nodes)"])
    kept |= {name: value for name, (value, _) in RAY_SETTINGS.items()}
    kept |= {name: ON_NODE for name in NODE_VALUES if launch.stage.model or name != WEIGHTS_DIR_VARIABLE}
    known = [*environ.items(), *launch.env.items()]
    secrets = [value for name, value in known if is_secret(name) and name not in NODE_VALUES]
    variables: list[Variable] = []
    for name in sorted({*environ, *kept}):
        outcome, reason = why(name, launch)
        if outcome == "dropped" and name in kept:
            outcome, reason = "set", "lets connections between nodes bypass the proxy"
        elif name in DEFAULTS and name not in environ and outcome == "passed":
            outcome, reason = "set", DEFAULTS[name][1]
        if outcome != "dropped" and name in (engine_settings or {}):
            reason += f"; engines set {(engine_settings or {})[name]} for themselves"
        if name in launch.env and name in kept and "$" in kept[name]:
            reason += ", expanded on each node"
        value = redacted(name, kept[name], secrets) if name in kept else None
        variables.append(Variable(name, outcome, reason, is_secret(name, environ.get(name, "")), value))
    return variables


def why(name: str, launch: LaunchConfig) -> tuple[Outcome, str]:
    """Return what happens to a variable of the user's environment, and why."""
    if name in RAY_SETTINGS:
        return "set", RAY_SETTINGS[name][1]
    if name in NODE_VALUES:
        return "set", NODE_VALUES[name]
    if name in launch.env:
        return "set", "launch.env" + (
            " must not hold secrets: train and submit refuse it" if secret_keys({name: launch.env[name]}) else ""
        )
    if is_denied(name):
        asked = "; launch.pass_env cannot let it through" if is_named(name, launch.pass_env) else ""
        return "dropped", _reason(name, DENIED) + asked
    if reason := _reason(name, ALLOWED):
        return "passed", reason
    if is_named(name, launch.pass_env):
        return "passed", "launch.pass_env"
    if name.lower() in (*PROXIES, "no_proxy"):
        return "dropped", "nodes must not talk through a proxy; launch.pass_env lets it through"
    return "dropped", "not on the allow-list; launch.pass_env lets it through"


def redacted(name: str, value: str, secrets: Iterable[str]) -> str:
    """Mask secrets in a value: all of a secret variable, other secrets inside it, credentials in a URL.

    >>> redacted("GREETING", "hello hunter2", ["hunter2"])
    'hello ********'
    """
    if is_secret(name) and name not in NODE_VALUES:
        return MASK
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_SECRET_LENGTH:
            value = value.replace(secret, MASK)
        elif secret and value == secret:
            value = MASK
    return without_secrets(value)


def report_text(variables: Sequence[Variable]) -> str:
    """Return the report for a terminal. Dropped variables are grouped by reason, without values."""
    passed, fixed, dropped = ([v for v in variables if v.outcome == kind] for kind in ("passed", "set", "dropped"))
    lines = [f"Reach Ray, the driver and the actors, from this environment ({len(passed)}):", *map(_line, passed)]
    lines += ["", f"Set for them, whatever this environment says ({len(fixed)}):", *map(_line, fixed)]
    lines += ["", f"Dropped ({len(dropped)}):"]
    by_reason: dict[str, list[str]] = {}
    for variable in dropped:
        name = _printable(variable.name) + (" (secret)" if variable.is_secret else "")
        by_reason.setdefault(variable.reason, []).append(name)
    for reason, names in sorted(by_reason.items()):
        wrapped = textwrap.wrap(", ".join(names), 110, initial_indent="    ", subsequent_indent="    ")
        lines += [f"  # {reason}", *wrapped]
    end = "A submitted job has the environment of `submit`, plus its modules and setup lines."
    return "\n".join([*lines, "", end]) + "\n"


def _reason(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of the longest entry that names the variable; "" for none."""
    fitting = [entry for entry in reasons if is_named(name, [entry])]
    return reasons[max(fitting, key=len)] if fitting else ""


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _line(variable: Variable) -> str:
    shown = _printable(variable.value or "")
    if len(shown) > _SHOWN_VALUE_LENGTH:
        shown = f"{shown[: _SHOWN_VALUE_LENGTH - 3]}..."
    return f"  {variable.name}={shown}  # {variable.reason}"
