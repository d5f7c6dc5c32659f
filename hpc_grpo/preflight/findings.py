"""What a check found, and how checks are run so that a broken one is a finding too."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_grpo.errors import HpcGrpoError

Status = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. `says` is what was found, `fix` what to do: never empty for a failure."""

    check: str
    status: Status
    says: str
    fix: str = ""


@dataclass(frozen=True)
class Group:
    """Findings about one place: the login node, the nodes, or what is between them."""

    name: str
    findings: tuple[Finding, ...]


def ok(check: str, says: str) -> Finding:
    return Finding(check, "ok", says)


def warning(check: str, says: str, fix: str) -> Finding:
    return Finding(check, "warning", says, fix)


def failure(check: str, says: str, fix: str) -> Finding:
    return Finding(check, "failure", says, fix)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, "skipped", why)


def guarded(check: str, run: Callable[[], Finding], deadline_s: float = 12.0) -> Finding:
    """The finding of `run`; a failure where it could not be made, with the error's words, or takes too long."""
    found: list[Finding] = []
    # A thread, since a look at a file system that hangs cannot be broken off.
    worker = threading.Thread(target=lambda: found.append(_caught(check, run)), daemon=True)
    worker.start()
    worker.join(deadline_s)
    if not found:
        fix = "look by hand whether a file system it looks at hangs (df), then whether the scheduler answers"
        return failure(check, f"the check did not end within {deadline_s:.0f} s", fix)
    return found[0]


def _caught(check: str, run: Callable[[], Finding]) -> Finding:
    try:
        return run()
    except (HpcGrpoError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        fix = "mend what it names; if that is not on your side, report it with this line"
        return failure(check, f"the check itself failed: {type(error).__name__}: {error}", fix)


def has_failure(groups: Iterable[Group]) -> bool:
    return any(finding.status == "failure" for group in groups for finding in group.findings)


_WORST_FIRST: Sequence[Status] = ("failure", "warning", "ok", "skipped")
_MAX_NAMED_NODES = 4


def merged(check: str, by_node: Sequence[tuple[str, Finding]]) -> Finding:
    """One finding for all nodes: the worst status, with the nodes that have it.

    >>> merged("gpus", [("a", ok("gpus", "4 idle")), ("b", ok("gpus", "4 idle"))]).says
    '4 idle, on both nodes'
    """
    status = min((finding.status for _, finding in by_node), key=_WORST_FIRST.index)
    found = [(node, finding) for node, finding in by_node if finding.status == status]
    by_text: dict[str, list[str]] = {}
    for node, finding in found:
        by_text.setdefault(finding.says, []).append(node)
    if len(by_node) == 1:
        says = found[0][1].says
    elif len(by_text) == 1 and len(found) == len(by_node):
        says = f"{found[0][1].says}, on {'both' if len(found) == 2 else f'all {len(found)}'} nodes"
    else:
        texts = [f"{_named(nodes)}: {text}" for text, nodes in by_text.items()]
        hidden = len(texts) - _MAX_NAMED_NODES
        says = "; ".join(texts[:_MAX_NAMED_NODES]) + (f"; and {hidden} more" if hidden > 0 else "")
    fixes = list(dict.fromkeys(finding.fix for _, finding in found if finding.fix))
    return Finding(check, status, says, "; ".join(fixes[:_MAX_NAMED_NODES]))


def _named(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:_MAX_NAMED_NODES])
    return shown if len(nodes) <= _MAX_NAMED_NODES else f"{shown} and {len(nodes) - _MAX_NAMED_NODES} more"
