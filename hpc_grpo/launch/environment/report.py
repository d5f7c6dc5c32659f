"""Say of each environment variable why it reaches Ray and the actors, or does not: `hpc-grpo env` prints it.

The rules are those of rules.py and agent/ray_command.py; here they get words. No secret's value is ever part of the
result: secrets are masked by their names, and their values wherever else they occur.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.agent.ray_command import RAY_SETTINGS
from hpc_grpo.launch.environment.rules import (
    ALLOWED,
    ALLOWED_PREFIXES,
    DENIED,
    DENIED_PREFIXES,
    PROXIES,
    filtered,
    is_denied,
    is_named,
)
from hpc_grpo.run.compiled import CACHES
from hpc_grpo.run.contract import COMPILED_ARCHIVE_VARIABLE, COMPILED_DIR_VARIABLE, WEIGHTS_DIR_VARIABLE
from hpc_grpo.system.secret import MASK, is_secret, secret_keys, without_secrets

Outcome = Literal["passed", "set", "dropped"]

ON_NODE = "(chosen on each node)"
ALL_NODES = "(names and network of the run's nodes)"

NODE_VALUES: dict[str, str] = {
    "RAY_AUTH_TOKEN_PATH": "the run's own token, in a file of mode 0600",
    "VLLM_HOST_IP": "the node's address on the interface between nodes",
    "GLOO_SOCKET_IFNAME": "the interface between nodes: launch.interface, else that of the default route",
    "HPC_GRPO_SHM_DIR": "the run's own folder in shared memory",
    "HPC_GRPO_ENGINE_PYTHON": "how Ray starts an engine: as a fork of the node's template (launch.templates)",
    "HPC_GRPO_LEARNER_PYTHON": "how Ray starts a learner: in the same way",
    COMPILED_DIR_VARIABLE: "the node's own folder of what engines compile (launch.keep_compiled)",
    COMPILED_ARCHIVE_VARIABLE: "where that is kept for later jobs",
    WEIGHTS_DIR_VARIABLE: "the node's own copy of model.path (launch.stage.model)",
    "TMPDIR": "the node's temp-dir, which goes with the attempt",
}
"""Variable -> what ray_environment sets it to on every node, whatever the environment says."""

DEFAULTS: dict[str, tuple[str, str]] = {
    "OMP_NUM_THREADS": ("1", "many processes share a node"),
    **dict.fromkeys(CACHES, (ON_NODE, "compile caches are node-local (launch.keep_compiled)")),
    "NCCL_SOCKET_IFNAME": (ON_NODE, "the interface between nodes, as for Gloo: else NCCL may start on another"),
}
"""Variable -> (value, reason): set by ray_environment unless the environment or launch.env has it."""

_LEAST_SECRET_LENGTH = 4
_SHOWN_VALUE_LENGTH = 48


@dataclass(frozen=True)
class Variable:
    """A variable and its fate. `value` is what reaches the actors: None if dropped, MASK for a secret."""

    name: str
    outcome: Outcome
    reason: str
    is_secret: bool
    value: str | None


def environment_report(
    environ: Mapping[str, str], launch: LaunchConfig, engine_settings: Mapping[str, str] | None = None
) -> list[Variable]:
    """Report on each variable of `environ`, launch.env and our own; engines set `engine_settings` for themselves."""
    kept = filtered(environ, launch.pass_env, launch.env, [ALL_NODES])
    left_out = _left_out(launch)
    kept |= {name: value for name, (value, _) in RAY_SETTINGS.items()}
    kept |= {name: ON_NODE for name in NODE_VALUES if name not in left_out}
    kept = {name: value for name, (value, _) in DEFAULTS.items() if name not in left_out} | kept
    known = [*environ.items(), *launch.env.items()]
    secrets = [value for name, value in known if is_secret(name) and name not in NODE_VALUES]
    variables: list[Variable] = []
    for name in sorted({*environ, *kept}):
        outcome, reason = _fate(name, name in kept, name in environ, launch)
        if outcome != "dropped" and name in (engine_settings or {}):
            reason += f"; engines set {(engine_settings or {})[name]} for themselves"
        if name in launch.env and name in kept and "$" in kept[name]:
            reason += ", expanded on each node"
        value = redacted(name, kept[name], secrets) if name in kept else None
        variables.append(Variable(name, outcome, reason, is_secret(name, environ.get(name, "")), value))
    return variables


def _left_out(launch: LaunchConfig) -> set[str]:
    """Return the variables of copies that nodes are not to make."""
    compiled = set() if launch.keep_compiled else {COMPILED_DIR_VARIABLE, COMPILED_ARCHIVE_VARIABLE, *CACHES}
    return compiled | (set() if launch.stage.model else {WEIGHTS_DIR_VARIABLE})


def why(name: str, launch: LaunchConfig) -> tuple[Outcome, str]:
    """Return what becomes of a variable of the user's environment, and why."""
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
        return "dropped", (DENIED.get(name) or _by_prefix(name, DENIED_PREFIXES)) + asked
    if name in ALLOWED:
        return "passed", ALLOWED[name]
    if reason := _by_prefix(name, ALLOWED_PREFIXES):
        return "passed", reason
    if is_named(name, launch.pass_env):
        return "passed", "launch.pass_env"
    if name.lower() in (*PROXIES, "no_proxy"):
        return "dropped", "a proxy must not stand between the nodes; launch.pass_env lets it through"
    return "dropped", "not on the allow-list; launch.pass_env lets it through"


def redacted(name: str, value: str, secrets: Iterable[str]) -> str:
    """Mask in a value what must not be shown: all of a secret, other secrets inside it, credentials in a URL.

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
    """Write the report for a terminal; dropped variables by reason, without values."""
    passed = [variable for variable in variables if variable.outcome == "passed"]
    fixed = [variable for variable in variables if variable.outcome == "set"]
    dropped = [variable for variable in variables if variable.outcome == "dropped"]
    lines = [f"Reach Ray, the driver and the actors, from this environment ({len(passed)}):", *map(_line, passed)]
    lines += ["", f"Set for them, whatever this environment says ({len(fixed)}):", *map(_line, fixed)]
    lines += ["", f"Dropped ({len(dropped)}):", *_dropped_lines(dropped)]
    lines += [
        "",
        "A job that was submitted starts from the environment of `submit`, its modules and setup lines added.",
    ]
    return "\n".join(lines) + "\n"


def _fate(name: str, is_kept: bool, is_in_environ: bool, launch: LaunchConfig) -> tuple[Outcome, str]:
    """Answer as `why`, also for what no user has set."""
    outcome, reason = why(name, launch)
    if outcome == "dropped" and is_kept:
        return "set", "spares the nodes of the run, since a proxy gets through"
    if name in DEFAULTS and not is_in_environ and outcome == "passed":
        return "set", DEFAULTS[name][1]
    return outcome, reason


def _by_prefix(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of the longest prefix that fits; "" without one."""
    fitting = [prefix for prefix in reasons if name.startswith(prefix)]
    return reasons[max(fitting, key=len)] if fitting else ""


def _line(variable: Variable) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in variable.value or "")
    if len(shown) > _SHOWN_VALUE_LENGTH:
        shown = f"{shown[: _SHOWN_VALUE_LENGTH - 3]}..."
    return f"  {variable.name}={shown}  # {variable.reason}"


def _dropped_lines(dropped: Sequence[Variable]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for variable in dropped:
        name = "".join(char if char.isprintable() else "?" for char in variable.name)
        by_reason.setdefault(variable.reason, []).append(name + (" (secret)" if variable.is_secret else ""))
    for reason, names in sorted(by_reason.items()):
        yield f"  # {reason}"
        yield from textwrap.wrap(", ".join(names), 110, initial_indent="    ", subsequent_indent="    ")
