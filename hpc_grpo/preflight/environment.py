"""What of the shell's environment leaks into jobs, and secrets that others could read."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpc_grpo.data import hugging_face
from hpc_grpo.launch.environment.report import environment_report
from hpc_grpo.launch.environment.rules import is_denied, is_secret
from hpc_grpo.preflight.cached_inputs import is_offline
from hpc_grpo.preflight.context import Context
from hpc_grpo.preflight.findings import Finding, failure, ok, skipped, warning

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_REACH_LAUNCHING = ("LD_PRELOAD",)
"""Training is spared them; the supervisor and the node agents, which start first, are not."""

_PRIVATE = stat.S_IRWXG | stat.S_IRWXO


def variables_finding(context: Context) -> Finding:
    """Variables that must not reach training, and whether the config tries to let them."""
    check, launch = "variables", context.launch
    if secret := [name for name in launch.env if is_secret(name)]:
        fix = "export it in your shell and name it in launch.pass_env: config.yaml is kept and shared"
        return failure(check, f"launch.env holds {', '.join(secret)}", fix)
    if refused := [name for name in launch.pass_env if is_denied(name.rstrip("*"))]:
        return warning(check, f"launch.pass_env cannot let through {', '.join(refused)}", "take it out of pass_env")
    if early := [name for name in _REACH_LAUNCHING if context.environ.get(name)]:
        fix = f"unset {' '.join(early)} before submitting; hpc-grpo env shows what reaches training"
        return warning(check, f"{', '.join(early)} would change the Python of the supervisor", fix)
    if str(launch.slurm.extra.get("export", "ALL")).partition(",")[0].upper() != "ALL":
        says = f"launch.slurm.extra.export = {launch.slurm.extra['export']} keeps your PATH and tokens out of the job"
        return warning(check, says, "take it out: training gets only what hpc-grpo lets through anyway")
    report = environment_report(context.environ, launch)
    dropped = [v.name for v in report if v.outcome == "dropped" and is_denied(v.name) and not _is_slurms(v.name)]
    return ok(check, f"kept out of training: {', '.join(dropped)}" if dropped else "none that must be kept out")


def proxies_finding(context: Context) -> Finding:
    """Proxies stand between nodes unless no_proxy names them, and training has none unless it is let through."""
    check, environ = "proxies", context.environ
    found = [name for name in environ if name.lower() in _PROXIES and environ[name]]
    if not found:
        return ok(check, "none")
    passed = [v.name for v in environment_report(environ, context.launch) if v.outcome != "dropped" and v.name in found]
    if not passed and not is_offline(context.job_environ):
        fix = f"launch.pass_env=[{', '.join(found)}] (nodes are then spared it), or HF_HUB_OFFLINE=1 in launch.env"
        return warning(check, f"{', '.join(found)} stays behind, and the job may download", fix)
    if not any(environ.get(name) for name in ("no_proxy", "NO_PROXY")):
        fix = "export no_proxy=localhost,127.0.0.1 and the nodes' network, for programs of your own"
        return warning(check, f"{', '.join(found)} is set without no_proxy", fix)
    return ok(check, f"{', '.join(found)}, with no_proxy; {'let through' if passed else 'kept out of training'}")


def secret_files_finding(context: Context) -> Finding:
    """Whether files with tokens and keys are the user's alone."""
    found = [path for path in secret_files(context) if path.is_file()]
    if not found:
        return skipped("secret files", "none found")
    return judged_secret_files({path: path.stat().st_mode for path in found})


def judged_secret_files(modes: Mapping[Path, int]) -> Finding:
    """`modes` as of stat(2)."""
    if exposed := [path for path, mode in modes.items() if mode & _PRIVATE]:
        says = ", ".join(f"{path} has mode {stat.S_IMODE(modes[path]):04o}" for path in exposed)
        return failure("secret files", says, f"chmod 600 {_words(exposed)}")
    return ok("secret files", f"yours alone: {_words(modes)}")


def secret_files(context: Context) -> Iterator[Path]:
    """Where W&B, Hugging Face and this run keep tokens; they need not exist."""
    environ = context.environ
    home = Path(environ.get("HOME") or Path.home())
    yield Path(environ.get("NETRC") or home / ".netrc")
    if "HF_TOKEN_PATH" in environ:
        yield Path(environ["HF_TOKEN_PATH"])
    # `hf auth login` writes below the shell's; the job's may be elsewhere.
    for folder in dict.fromkeys((hugging_face.home(environ), hugging_face.home(context.job_environ))):
        yield from (folder / name for name in ("token", "stored_tokens"))
    if context.config is not None:
        from hpc_grpo.run.paths import RunDir

        yield RunDir(context.root / context.config.run.name).secret


def _words(paths: Iterable[Path]) -> str:
    return " ".join(map(str, paths))


def _is_slurms(name: str) -> bool:
    return name.startswith(("SLURM", "SBATCH_", "SRUN_"))
