"""What became of runs to which something happened, as the table that is printed at the end of their tests."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest


@dataclass(frozen=True)
class Outcome:
    """What became of the run; `state` is the word of `status`.

    `lost_s`: from the blow until a step was done that had not been; None if none was. `lost_steps` were trained twice.
    `told` is what `status` and `explain` said.
    """

    state: str
    num_attempts: int
    num_restarts: int
    lost_s: float | None
    lost_steps: int
    told: str

    titles: ClassVar = ("what happened", "ended", "attempts", "restarts", "seconds lost", "steps lost")

    def row(self, name: str) -> tuple[str, ...]:
        lost = "-" if self.lost_s is None else f"{self.lost_s:.0f}"
        return name, self.state, str(self.num_attempts), str(self.num_restarts), lost, str(self.lost_steps)


def print_table(reporter: pytest.TerminalReporter, outcomes: Sequence[tuple[str, Outcome]]) -> None:
    """Print a row for each outcome, under its name, and then what was told of it."""
    if not outcomes:
        return
    reporter.section("what became of the runs")
    rows = [Outcome.titles, *(outcome.row(name) for name, outcome in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        reporter.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name, outcome in outcomes:
        reporter.line(f"\n{name}\n{textwrap.indent(outcome.told, '  ')}")
