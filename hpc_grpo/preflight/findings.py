"""Findings: the outcome of each check, how checks are run, and how outcomes are printed.

A check that raises or hangs becomes a finding too. So one bad file system does not hide the other findings.
"""

from __future__ import annotations

import subprocess
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from hpc_grpo.config import Config, LaunchConfig
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.launch.environment import job_environ
from hpc_grpo.system.readable import counted

Status = Literal["ok", "warning", "failure", "skipped"]

_WORST_FIRST: Sequence[Status] = ("failure", "warning", "ok", "skipped")
MAX_NAMED_NODES = 4
"""A finding names at most this many nodes, so that its reason stays visible."""

_STATUS_WIDTH = len("skipped") + 1
_INDENT = " " * (_STATUS_WIDTH + 2)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: `says` is what was found, `fix` what to do, never empty for a failure."""

    status: Status
    says: str
    fix: str = ""


Findings = dict[str, Finding]
"""Findings by the name of their check."""

Groups = dict[str, Findings]
"""The findings about each place: the login node, the nodes, and their connections."""

GROUPS = TypeAdapter(Groups)
"""Writes groups as JSON, and reads them."""


@dataclass(frozen=True)
class Context:
    """The input of every check: the user's config and environment.

    `config` is None without a CONFIG, or if the CONFIG does not load: `config_error` is the reason. `environ` is the
    environment of the shell, with the exports of a .sh config.
    """

    config: Config | None
    launch: LaunchConfig
    environ: Mapping[str, str]
    config_error: str = ""

    @property
    def why_no_config(self) -> str:
        return "the CONFIG does not load" if self.config_error else "give a CONFIG"

    @property
    def root(self) -> Path:
        """The absolute folder of run directories."""
        return self.config.run.root if self.config else Path("runs").absolute()

    @property
    def job_environ(self) -> Mapping[str, str]:
        """`environ` with launch.env, without the values that only a job's own variables can complete."""
        return job_environ(self.environ, self.launch.env)


def ok(says: str) -> Finding:
    return Finding("ok", says)


def warning(says: str, fix: str) -> Finding:
    return Finding("warning", says, fix)


def failure(says: str, fix: str) -> Finding:
    return Finding("failure", says, fix)


def skipped(why: str) -> Finding:
    return Finding("skipped", why)


def guarded(run: Callable[[], Finding], deadline_s: float = 12.0) -> Finding:
    """Return the finding of `run`; a failure if it raises an expected error or exceeds `deadline_s`.

    Runs the check in a thread, which continues after the deadline.
    """
    found: list[Finding] = []

    def note() -> None:
        try:
            found.append(run())
        except (HpcGrpoError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            fix = "correct what the error names; if the cause is in hpc-grpo, report this line"
            found.append(failure(f"the check itself failed: {type(error).__name__}: {error}", fix))

    worker = threading.Thread(target=note, daemon=True)  # nothing interrupts a call on a file system that hangs
    worker.start()
    worker.join(deadline_s)
    if not found:
        fix = "test by hand whether a file system hangs (df), then whether the scheduler answers"
        found.append(failure(f"the check did not end within {deadline_s:.0f} s", fix))
    return found[0]


def has_failure(groups: Groups) -> bool:
    return any(finding.status == "failure" for found in groups.values() for finding in found.values())


def merged(by_node: Mapping[str, Finding]) -> Finding:
    """Return one finding for all nodes: the worst status, with the nodes that have it.

    >>> merged({"a": ok("4 idle"), "b": ok("4 idle")}).says
    '4 idle, on both nodes'
    """
    status = min((finding.status for finding in by_node.values()), key=_WORST_FIRST.index)
    worst = {node: finding for node, finding in by_node.items() if finding.status == status}
    first = next(iter(worst.values()))
    nodes_by_text: dict[str, list[str]] = {}
    for node, finding in worst.items():
        nodes_by_text.setdefault(finding.says, []).append(node)
    if len(by_node) == 1:
        says = first.says
    elif len(nodes_by_text) == 1 and len(worst) == len(by_node):
        says = f"{first.says}, on {'both' if len(worst) == 2 else f'all {len(worst)}'} nodes"
    else:
        texts = [f"{_first(nodes, ', ', ' and')}: {text}" for text, nodes in nodes_by_text.items()]
        says = _first(texts, "; ", "; and")
    fixes = list(dict.fromkeys(finding.fix for finding in worst.values() if finding.fix))
    return Finding(status, says, "; ".join(fixes[:MAX_NAMED_NODES]))


def _first(texts: Sequence[str], between: str, last: str) -> str:
    hidden = len(texts) - MAX_NAMED_NODES
    return between.join(texts[:MAX_NAMED_NODES]) + (f"{last} {hidden} more" if hidden > 0 else "")


def report_text(groups: Groups, took_s: float) -> str:
    """Return a table: one line per check below the name of its group, its fix below the check, counts at the end."""
    width = max((len(check) for found in groups.values() for check in found), default=0) + 2
    lines: list[str] = []
    for name, found in groups.items():
        if found:
            lines += [f"{name}:", *(line for own in found.items() for line in _lines(*own, width)), ""]
    counts = Counter(finding.status for found in groups.values() for finding in found.values())
    parts = [f"{counts['ok']} ok", counted(counts["warning"], "warning"), counted(counts["failure"], "failure")]
    return "\n".join([*lines, f"{', '.join(parts)}, {counts['skipped']} skipped in {took_s:.0f} s"]) + "\n"


def facts_of(groups: Groups) -> list[dict[str, Any]]:
    """List the findings, each with the name of its group and of its check."""
    return [
        {"group": name, "check": check, **asdict(finding)}
        for name, found in groups.items()
        for check, finding in found.items()
    ]


def _lines(check: str, finding: Finding, width: int) -> Iterable[str]:
    says = textwrap.indent(finding.says.strip(), _INDENT + " " * width).strip()
    yield f"  {finding.status:<{_STATUS_WIDTH}}{check:<{width}}{says}"
    if finding.fix:
        yield f"{_INDENT}fix: {textwrap.indent(finding.fix, _INDENT + '     ').strip()}"
