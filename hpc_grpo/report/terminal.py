"""Print what a run has learned: its curves as text, and completions before and after."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from hpc_grpo.metrics.evals import bounds_of
from hpc_grpo.metrics.record import PASS_AT_1, REWARD
from hpc_grpo.report.samples import before_and_after
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import MetricColumns
from hpc_grpo.system.say import say

_PASS_AT_K = re.compile("eval/(?:[^/@]+/)?pass@[0-9]+(?:/.+)?")
_MAX_POINTS = 800
"""A terminal has fewer columns."""

_LINE, _MARKS = "⠤", "●■▲◆○□△◇"


@dataclass(frozen=True)
class Series:
    """One curve: its values by step, and the bounds of the last value's 95% interval, if it has one."""

    name: str
    points: dict[int, float]
    bounds: str = ""

    @property
    def is_marked(self) -> bool:
        """Return whether it has few points, with a mark at each."""
        return self.name.startswith("eval/")

    def __str__(self) -> str:
        (first, begin), *_, (last, end) = [*self.points.items()] * 2
        return f"{self.name}: {begin:.3f} (step {first}) -> {end:.3f}{self.bounds} (step {last})"


def print_report(run_dir: RunDir, in_their_order: int = 0) -> None:
    """Print a run's curves and completions.

    Prints completions of a few prompts, newly solved first. `in_their_order`: of this many, in the data's order.
    """
    metrics = MetricColumns(run_dir.metrics)
    metrics.read()
    curves = learning_curves(metrics)
    if not curves:
        say(f"{run_dir.name}: no step has ended yet. hpc-grpo status --why {run_dir.path} says why.")
        return
    if importlib.util.find_spec("plotext"):  # missing in the light installation
        say(draw_text([curve for curve in curves if "/" not in curve.name.partition("@")[2]]))  # without single sources
    for curve in curves:
        say(str(curve))
    say(f"\n{before_and_after(run_dir, in_their_order)}")


def learning_curves(metrics: MetricColumns) -> list[Series]:
    """Return the reward and every eval pass@k, single sources last; for SFT, which has neither, the loss.

    If no completion of an eval was solved, the eval's reward shows whether the run learns.
    """
    names = metrics.columns
    wanted = [name for name in (REWARD, PASS_AT_1) if name in names]
    if (solved := metrics.points(PASS_AT_1)) and not any(solved.values()):
        wanted.append("eval/reward_mean")
    others = {name for name in names if _PASS_AT_K.fullmatch(name)} - {PASS_AT_1}
    wanted += sorted(others, key=lambda name: (name.count("/"), name))
    return [_curve_of(name, metrics) for name in wanted or ["loss/policy"] if metrics.points(name)]


def _curve_of(name: str, metrics: MetricColumns) -> Series:
    points = metrics.points(name)
    low, high = (metrics.points(bound).get(max(points)) for bound in bounds_of(name))
    return Series(name, points, "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def draw_text(curves: Sequence[Series]) -> str:
    """Draw lines of braille dots, with a mark at each point of marked series and the legend below.

    Uses no colours: a job's log has none, and some readers cannot distinguish them.
    """
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)  # not limited by this terminal, because the output may go to a file
    plotext.plotsize(80, 18)  # columns, rows
    lines = {curve.name: (_thinned(list(curve.points)), _thinned(list(curve.points.values()))) for curve in curves}
    marks = list(zip(_MARKS, (curve.name for curve in curves if curve.is_marked), strict=False))
    for line in lines.values():
        plotext.plot(*line, marker="braille")
    for mark, name in marks:
        plotext.scatter(*lines[name], marker=mark)
    first, last = min(min(curve.points) for curve in curves), max(max(curve.points) for curve in curves)
    plotext.xticks(sorted({first, (first + last) // 2, last}))
    plotext.xlabel("step")
    legend = [*marks, *((_LINE, curve.name) for curve in curves if not curve.is_marked)]
    drawn = [row.rstrip() for row in plotext.uncolorize(plotext.build()).splitlines()]
    return "\n".join([*drawn, f"  {'   '.join(f'{mark} {name}' for mark, name in legend)}"])


def _thinned(column: Sequence[float]) -> Sequence[float]:
    """Return the means of neighbours, at most 800."""
    if len(column) <= _MAX_POINTS:
        return column
    edges = [index * len(column) // _MAX_POINTS for index in range(_MAX_POINTS + 1)]
    return [fmean(column[a:b]) for a, b in pairwise(edges)]
