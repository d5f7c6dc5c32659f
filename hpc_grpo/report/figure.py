"""Describe a figure once, and draw it three ways: as text in a terminal, as PNG, and as SVG for a page.

Nothing in the terminal needs colours: a job's log has none, and not every reader can tell them apart.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hpc_grpo.system.readable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
"""Colours for any colour vision, as a test computes; yellow, weak on white, is last.

Okabe and Ito 2008, Color Universal Design: https://jfly.uni-koeln.de/color/."""

_MAX_POINTS = 800
"""A picture has fewer columns."""

_TERMINAL_LINE, _TERMINAL_MARKS = "⠤", "●■▲◆○□△◇"


@dataclass(frozen=True)
class Series:
    """One curve; all tuples have the same length. `low` and `high` bound a 95% interval, and are empty without one.

    A `marked` series has few points and a mark at each. A histogram counts `values`, and has no `steps`.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marked: bool = False

    def __str__(self) -> str:
        bounds = f" [{self.low[-1]:.3f}, {self.high[-1]:.3f}]" if self.low else ""
        first = f"{self.values[0]:.3f} (step {self.steps[0]})"
        return f"{self.name}: {first} -> {self.values[-1]:.3f}{bounds} (step {self.steps[-1]})"

    def thinned(self) -> Series:
        """Return the curve or, of one with more than 800 points, the means of neighbours."""
        if len(self.steps) <= _MAX_POINTS:
            return self
        edges = [index * len(self.steps) // _MAX_POINTS for index in range(_MAX_POINTS + 1)]

        def means(column: Sequence[float]) -> Sequence[float]:
            return [fmean(column[a:b]) for a, b in pairwise(edges)] if column else ()

        steps, values, low, high = map(means, (self.steps, self.values, self.low, self.high))
        return replace(self, steps=steps, values=values, low=low, high=high)


@dataclass(frozen=True)
class Bar:
    """A stretch of a row, from `begin` to `end`; its `kind` gives the colour."""

    row: str
    begin: float
    end: float
    kind: str


@dataclass(frozen=True)
class Figure:
    """`bars` are drawn as a timeline, which writes the kind into each bar, or as shares, which have a legend."""

    title: str
    series: Sequence[Series] = ()
    bars: Sequence[Bar] = ()
    form: Literal["lines", "stack", "histogram", "timeline", "shares"] = "lines"
    x_label: str = "step"
    y_label: str = ""


def draw_text(figure: Figure, num_columns: int = 80, num_rows: int = 18) -> str:
    """Draw lines of braille dots, and a mark at each point of marked series, with the legend below."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)  # not by this terminal: the output may go to a file
    plotext.plotsize(num_columns, num_rows)
    lines = [series.thinned() for series in figure.series]
    marks = list(zip(_TERMINAL_MARKS, (line for line in lines if line.marked), strict=False))
    for line in lines:
        plotext.plot(line.steps, line.values, marker="braille")
    for mark, line in marks:
        plotext.scatter(line.steps, line.values, marker=mark)
    first, last = min(line.steps[0] for line in figure.series), max(line.steps[-1] for line in figure.series)
    plotext.xticks(sorted({first, (first + last) // 2, last}))
    plotext.xlabel(figure.x_label)
    legend = [*marks, *((_TERMINAL_LINE, line) for line in lines if not line.marked)]
    drawn = [row.rstrip() for row in plotext.uncolorize(plotext.build()).splitlines()]
    return "\n".join([*drawn, f"  {'   '.join(f'{mark} {line.name}' for mark, line in legend)}"])


def draw_image(figure: Figure, file_format: Literal["png", "svg"]) -> bytes:
    """Draw a PNG of 960 x 540 pixels, or a smaller SVG, of which a page has many."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas  # not pyplot, which looks for a display and keeps every figure

    num_rows = len({bar.row for bar in figure.bars})
    small = (11.0 if figure.form == "timeline" else 5.4, 0.9 + 0.32 * num_rows if num_rows else 3.2)
    # Names are not ours: "$" in one must not be read as mathematics. Text stays text, which is small and sharp.
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none", "font.size": 9}):
        canvas = Canvas(figsize=(8, 4.5) if file_format == "png" else small, dpi=120, layout="constrained")
        axes = canvas.add_subplot()
        (_draw_bars if figure.bars else _draw_series)(axes, figure)
        axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
        axes.set_title(_label(figure.title), fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        num_names = len(axes.get_legend_handles_labels()[1])
        if num_names > (file_format == "svg"):  # on a page, the title says what a single curve is
            axes.legend(fontsize=7 if num_names > 4 else 8, ncols=1 + num_names // 9, framealpha=0.6)
        file = io.BytesIO()
        canvas.savefig(file, format=file_format, metadata={"Date": None})
        return file.getvalue()


def _draw_series(axes: Axes, figure: Figure) -> None:
    rows = [series.thinned() for series in figure.series]
    if figure.form == "stack":
        names, values = [_label(row.name) for row in rows], [row.values for row in rows]
        axes.stackplot(rows[0].steps, *values, labels=names, colors=PALETTE[: len(rows)], linewidth=0)
        return
    longest = max((value for row in rows for value in row.values), default=1)
    for row, (color, line) in zip(rows, curve_styles(), strict=False):
        style: dict[str, Any] = {"color": color, "linestyle": line, "label": _label(row.name)}
        if figure.form == "histogram":
            axes.hist(row.values, bins=40, range=(0, max(1, longest)), histtype="step", **style)
            continue
        mark = "o" if row.marked or len(row.steps) == 1 else None
        axes.plot(row.steps, row.values, marker=mark, markersize=3, **style)
        if row.low:
            axes.fill_between(row.steps, row.low, row.high, color=color, alpha=0.15, linewidth=0)


def _draw_bars(axes: Axes, figure: Figure) -> None:
    names = list(dict.fromkeys(bar.row for bar in figure.bars))
    is_timeline = figure.form == "timeline"
    for kind, color in zip(dict.fromkeys(bar.kind for bar in figure.bars), cycle(PALETTE), strict=False):
        bars = [bar for bar in figure.bars if bar.kind == kind]
        rows, begins, lengths = zip(*((names.index(b.row), b.begin, b.end - b.begin) for b in bars), strict=True)
        label, alpha = ("", 0.6) if is_timeline else (_label(kind), 1.0)
        axes.barh(rows, lengths, left=begins, height=0.7, color=color, alpha=alpha, label=label)
        for row, begin in zip(rows, begins, strict=True) if is_timeline else ():
            axes.text(begin, row, f" {_label(kind)}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.invert_yaxis()


def curve_styles() -> Iterator[tuple[str, str]]:
    """Yield colours, then the same colours with other lines."""
    yield from ((color, line) for line in cycle(("-", "--", ":", "-.")) for color in PALETTE[:7])


def _label(text: str) -> str:
    """Return a printable name in one line; matplotlib leaves out labels that begin with an underscore."""
    text = printable(text).replace("\n", " ")
    return f" {text}" if text.startswith("_") else text
