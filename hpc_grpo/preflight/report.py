"""Findings as a table for a terminal, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hpc_grpo.preflight.findings import Finding, Group

_STATUS_WIDTH = len("skipped") + 1
_INDENT = " " * (_STATUS_WIDTH + 2)


def report_text(groups: Sequence[Group], took_s: float) -> str:
    """One line per check below the name of its group, a fix below what needs one, and the sum of it."""
    width = max((len(finding.check) for group in groups for finding in group.findings), default=0) + 2
    lines: list[str] = []
    for group in groups:
        if group.findings:
            lines += [f"{group.name}:", *(line for finding in group.findings for line in _lines(finding, width)), ""]
    counts = Counter(finding.status for group in groups for finding in group.findings)
    told = [f"{counts['ok']} ok", _counted(counts["warning"], "warning"), _counted(counts["failure"], "failure")]
    return "\n".join([*lines, f"{', '.join(told)}, {counts['skipped']} skipped in {took_s:.0f} s"]) + "\n"


def to_json(groups: Iterable[Group]) -> str:
    """A list of findings, each with the name of its group."""
    return json.dumps(
        [{"group": group.name, **asdict(finding)} for group in groups for finding in group.findings], indent=2
    )


def from_json(text: str) -> list[Group]:
    """What `to_json` wrote. Raises ValueError or TypeError for anything else."""
    by_group: dict[str, list[Finding]] = {}
    values: list[dict[str, Any]] = json.loads(text)
    for value in values:
        by_group.setdefault(value.pop("group"), []).append(Finding(**value))
    return [Group(name, tuple(findings)) for name, findings in by_group.items()]


def _lines(finding: Finding, width: int) -> Iterable[str]:
    says = textwrap.indent(finding.says.strip(), _INDENT + " " * width).strip()
    yield f"  {finding.status:<{_STATUS_WIDTH}}{finding.check:<{width}}{says}"
    if finding.fix:
        yield f"{_INDENT}fix: {textwrap.indent(finding.fix, _INDENT + '     ').strip()}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
