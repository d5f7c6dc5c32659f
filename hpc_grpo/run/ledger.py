"""The ledger: the ordinals of each step. `python -m hpc_grpo.run.ledger RUN_DIR` checks a run's ledger.

`ledger.jsonl` is append-only. After a resume, steps later than the checkpoint are trained again. So a line cancels all
earlier lines of its step and of later steps. The remaining lines are the history of the current weights.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.run.files import drop_torn_line, read_jsonl, when_there_is_space
from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class LedgerLine:
    """`ordinals` are all of the step. Of them `num_dropped` were only sampled, `num_passed_over` not even sampled."""

    step: int
    attempt: int
    ordinals: tuple[int, ...]
    num_dropped: int = 0
    num_passed_over: int = 0


class Ledger:
    """Appends a line for every finished step. `append` returns after a sync, because a checkpoint follows."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._path, self._attempt = run_dir.ledger, attempt
        drop_torn_line(self._path)

    def append(
        self, step: int, ordinals: Sequence[int], *, dropped: Sequence[int] = (), passed_over: Sequence[int] = ()
    ) -> None:
        line = {"step": step, "attempt": self._attempt, "ordinals": list(ordinals)}
        untrained = {"dropped": list(dropped), "passed_over": list(passed_over)}
        line |= {name: own for name, own in untrained.items() if own}

        def write() -> None:
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                drop_torn_line(self._path)
                raise

        when_there_is_space(write, self._path.name)


@dataclass(frozen=True)
class LedgerVerdict:
    """The ordinals, from 0, that the current weights used. `undone` counts steps that were trained and later cancelled.

    `repeated` ordinals were used more than once, `skipped` never. `gaps` are steps without a line. `dropped` and
    `passed_over` count ordinals that were used but not trained on.
    """

    steps: int
    ordinals: int
    undone: int
    repeated: tuple[int, ...]
    skipped: tuple[int, ...]
    gaps: tuple[int, ...]
    dropped: int = 0
    passed_over: int = 0

    @property
    def is_sound(self) -> bool:
        return not (self.repeated or self.skipped or self.gaps)

    def __str__(self) -> str:
        counted = f"{self.steps} steps, {self.ordinals} ordinals, {self.undone} steps undone by a resume"
        faults = {
            "ordinals used twice": self.repeated,
            "ordinals skipped": self.skipped,
            "steps without a line": self.gaps,
        }
        wrong = "; ".join(f"{name}: {list(values)}" for name, values in faults.items() if values)
        sound = "every ordinal trained exactly once"
        if self.dropped or self.passed_over:
            trained = self.ordinals - self.dropped - self.passed_over
            untrained = f"{self.dropped} sampled and dropped, {self.passed_over} passed over"
            sound = f"every ordinal used exactly once, {trained} trained, {untrained}"
        return f"{counted}: {wrong or sound}"


def surviving_lineage(lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """Return the lines of the steps that the newest weights were trained on, in order of steps.

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
    """Check whether the surviving lineage used every ordinal exactly once, and has a line for every step."""
    lines = []
    for values in read_jsonl(run_dir.ledger):
        step, attempt, ordinals = values.get("step"), values.get("attempt"), values.get("ordinals")
        # Skip a line that the disk changed: its step becomes a gap.
        if isinstance(step, int) and isinstance(attempt, int) and isinstance(ordinals, list):
            dropped, passed_over = (len(values.get(name, ())) for name in ("dropped", "passed_over"))
            lines.append(LedgerLine(step, attempt, tuple(ordinals), dropped, passed_over))
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
        dropped=sum(line.num_dropped for line in lineage),
        passed_over=sum(line.num_passed_over for line in lineage),
    )


def main() -> int:
    verdict = check_ledger(RunDir(Path(sys.argv[1])))
    print(verdict)
    return 0 if verdict.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
