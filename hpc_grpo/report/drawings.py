"""Draw the pictures of the report page as SVG: several runs over each other, in colours that all can tell apart."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

from hpc_grpo.system.readable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hpc_grpo.report.curves import Curve

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
"""Okabe and Ito's colours, which people with any colour vision can tell apart, as a test computes; the yellow, weak on
white, last.

Okabe and Ito 2008, Color Universal Design: https://jfly.uni-koeln.de/color/."""

_LINES = ("-", "--", ":", "-.")
_MAX_POINTS = 800
"""More than a picture has columns; of longer curves each point is the mean of neighbours."""


@dataclass(frozen=True)
class Picture:
    """Hold a picture as the `src` of an <img>: there its text cannot act on the page."""

    title: str
    src: str


@dataclass(frozen=True)
class Bar:
    """Hold a stretch of time in a row of a timeline; times are unix seconds."""

    row: str
    begin: float
    end: float
    kind: str


def draw_curves(title: str, curves: Mapping[str, Curve]) -> Picture:
    """Draw one metric of several runs, by their names; an interval is a band."""
    with _drawn(title) as (axes, done):
        for (name, curve), (color, line) in zip(curves.items(), curve_styles(), strict=False):
            steps, values, low, high = (thinned(row) for row in (curve.steps, curve.values, curve.low, curve.high))
            mark = "o" if curve.is_eval or len(steps) == 1 else None
            axes.plot(steps, values, color=color, linestyle=line, marker=mark, markersize=3, label=_label(name))
            if low:
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xlabel("step")
        _legend(axes, len(curves))
    return done[0]


def draw_phases(title: str, steps: Sequence[int], phases: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the seconds that each step spent in each phase, over each other."""
    with _drawn(title) as (axes, done):
        rows = [thinned(seconds) for seconds in phases.values()]
        axes.stackplot(thinned(steps), *rows, labels=list(phases), colors=PALETTE[: len(phases)], linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel("s")
        _legend(axes, len(phases))
    return done[0]


def draw_shares(title: str, rows: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the seconds that each row spent in each phase as a bar, one phase after the other."""
    colors = dict(zip(dict.fromkeys(phase for phases in rows.values() for phase in phases), PALETTE, strict=False))
    with _drawn(title, size=(5.4, 0.9 + 0.3 * len(rows))) as (axes, done):
        for index, phases in enumerate(rows.values()):
            begin = 0.0
            for phase, seconds in phases.items():
                label = _label(phase) if index == 0 else None
                axes.barh(index, seconds, left=begin, height=0.7, color=colors[phase], label=label)
                begin += seconds
        axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("s")
        _legend(axes, len(colors))
    return done[0]


def draw_histogram(title: str, unit: str, values: Mapping[str, Sequence[int]]) -> Picture:
    """Draw how often lengths occur, each series as an outline over the others."""
    with _drawn(title) as (axes, done):
        longest = max((length for of_one in values.values() for length in of_one), default=1)
        for (name, of_one), (color, line) in zip(values.items(), curve_styles(), strict=False):
            axes.hist(
                of_one,
                bins=40,
                range=(0, max(1, longest)),
                histtype="step",
                color=color,
                linestyle=line,
                label=_label(name),
            )
        axes.set_xlabel(unit)
        axes.set_ylabel("completions")
        _legend(axes, len(values))
    return done[0]


def draw_timeline(title: str, bars: Sequence[Bar]) -> Picture:
    """Draw stretches of time, a row for each name, in the colour of their kind; the kind also stands in the bar."""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    kinds = dict(zip(dict.fromkeys(bar.kind for bar in bars), cycle(PALETTE), strict=False))
    first = min(bar.begin for bar in bars)
    with _drawn(title, size=(11, 0.9 + 0.32 * len(rows))) as (axes, done):
        for bar in bars:
            place = ((bar.begin - first) / 3600, (bar.end - bar.begin) / 3600)
            axes.barh(rows.index(bar.row), place[1], left=place[0], height=0.7, color=kinds[bar.kind], alpha=0.6)
            axes.text(place[0], rows.index(bar.row), f" {_label(bar.kind)}", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("hours")
    return done[0]


def thinned(values: Sequence[float]) -> list[float]:
    """Return the values or, of too many, the means of neighbours.

    >>> len(thinned(range(100_000)))
    800
    """
    count = len(values)
    if count <= _MAX_POINTS:
        return list(values)
    edges = [index * count // _MAX_POINTS for index in range(_MAX_POINTS + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


@contextmanager
def _drawn(title: str, size: tuple[float, float] = (5.4, 3.2)) -> Iterator[tuple[Axes, list[Picture]]]:
    """Give axes to draw on; the finished picture is put into the list."""
    import matplotlib
    from matplotlib.figure import Figure

    # Names are not ours: "$" in one must not be read as mathematics. Text stays text, which is small and sharp.
    settings: dict[str, Any] = {"text.parse_math": False, "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        done: list[Picture] = []
        yield axes, done
        axes.set_title(_label(title), fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    done.append(Picture(title, f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"))


def curve_styles() -> Iterator[tuple[str, str]]:
    """Yield colours, then the same ones with other lines."""
    yield from ((color, line) for line in cycle(_LINES) for color in PALETTE[:7])


def _legend(axes: Axes, num_names: int) -> None:
    if num_names > 1:
        axes.legend(fontsize=7 if num_names > 4 else 8, ncols=1 + num_names // 9, framealpha=0.6)


def _label(text: str) -> str:
    """Return a name for a picture; matplotlib passes over labels that begin with an underscore."""
    text = printable(text).replace("\n", " ")
    return f" {text}" if text.startswith("_") else text
