"""Keep the ledger, the ordinals that each step trained on. `python -m hpc_grpo.run.ledger RUN_DIR` checks a run's.

`ledger.jsonl` is append-only. Steps after the checkpoint that an attempt resumes from are trained again, so a line
undoes every earlier line of its own step and later ones; what is left is the lineage of the weights that survived.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.run.files import drop_torn_line, read_jsonl, when_there_is_space
from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class LedgerLine:
    step: int
    attempt: int
    ordinals: tuple[int, ...]


class Ledger:
    """Appends a line for every finished step; on disk when `append` returns, since a checkpoint follows it."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._path = run_dir.ledger
        self._attempt = attempt
        drop_torn_line(self._path)

    def append(self, step: int, ordinals: Sequence[int]) -> None:
        line = {"step": step, "attempt": self._attempt, "ordinals": list(ordinals)}
        when_there_is_space(lambda: self._write(json.dumps(line) + "\n"), self._path.name)

    def _write(self, line: str) -> None:
        try:
            with self._path.open("a") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            drop_torn_line(self._path)
            raise


@dataclass(frozen=True)
class LedgerVerdict:
    """The ordinals, from 0, that the surviving lineage trained on; `undone` counts steps trained and then undone.

    `repeated` and `skipped` are ordinals trained more than once and not at all; `gaps` are steps without a line.
    """

    steps: int
    ordinals: int
    undone: int
    repeated: tuple[int, ...]
    skipped: tuple[int, ...]
    gaps: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        return not (self.repeated or self.skipped or self.gaps)

    def __str__(self) -> str:
        counted = f"{self.steps} steps, {self.ordinals} ordinals, {self.undone} steps undone by a resume"
        wrong = [
            f"{name} {list(values)}"
            for name, values in (
                ("ordinals trained twice:", self.repeated),
                ("ordinals skipped:", self.skipped),
                ("steps without a line:", self.gaps),
            )
            if values
        ]
        return f"{counted}: {'; '.join(wrong) or 'every ordinal trained exactly once'}"


def surviving_lineage(lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """Return the lines of the steps that the newest weights have behind them, by step.

    >>> [line.attempt for line in surviving_lineage([LedgerLine(s, a, ()) for s, a in [(1, 1), (2, 1), (2, 2)]])]
    [1, 2]
    """
    lineage: list[LedgerLine] = []
    for line in lines:
        while lineage and lineage[-1].step >= line.step:
            lineage.pop()
        lineage.append(line)
    return lineage


def check_ledger(run_dir: RunDir) -> LedgerVerdict:
    """Judge whether the surviving lineage trained every ordinal exactly once."""
    lines = [line for values in read_jsonl(run_dir.ledger) if (line := _ledger_line(values)) is not None]
    lineage = surviving_lineage(lines)
    counts = Counter(ordinal for line in lineage for ordinal in line.ordinals)
    steps = {line.step for line in lineage}
    return LedgerVerdict(
        steps=len(steps),
        ordinals=len(counts),
        undone=len(lines) - len(lineage),
        repeated=tuple(sorted(ordinal for ordinal, count in counts.items() if count > 1)),
        skipped=tuple(ordinal for ordinal in range(max(counts, default=-1)) if ordinal not in counts),
        gaps=tuple(step for step in range(1, max(steps, default=0)) if step not in steps),
    )


def _ledger_line(values: dict[str, Any]) -> LedgerLine | None:
    """Return the line; None for one that the disk changed, whose step then counts as a gap."""
    step, attempt, ordinals = values.get("step"), values.get("attempt"), values.get("ordinals")
    if not (isinstance(step, int) and isinstance(attempt, int) and isinstance(ordinals, list)):
        return None
    return LedgerLine(step, attempt, tuple(ordinals))


def main() -> int:
    verdict = check_ledger(RunDir(Path(sys.argv[1])))
    print(verdict)
    return 0 if verdict.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
