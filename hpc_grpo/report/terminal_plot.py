"""Curves as text: braille dots, 2 x 4 to a character. Each character cell belongs to one curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of the dot at [row][column] of a character."""
_MARKS = "●■▲◆"
_LABEL_COLUMNS = 8


@dataclass(frozen=True)
class Curve:
    """One metric over the steps that have it; both tuples have the same length, at least 1."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def plot(curves: Sequence[Curve], num_columns: int = 80, num_rows: int = 14) -> str:
    """All curves over common axes. Evals, which have few points, carry a mark at each of them."""
    low, high = _padded_range([value for curve in curves for value in curve.values])
    first = min(curve.steps[0] for curve in curves)
    last = max(max(curve.steps[-1] for curve in curves), first + 1)
    cells = [[" "] * num_columns for _ in range(num_rows)]

    def dot(step: float, value: float) -> tuple[int, int]:
        column = round((step - first) / (last - first) * (2 * num_columns - 1))
        return column, round((high - value) / (high - low) * (4 * num_rows - 1))

    for curve in curves:
        points = [dot(step, value) for step, value in zip(curve.steps, curve.values, strict=True)]
        _draw_line(cells, points)
    legend = []
    for mark, curve in zip(_MARKS, (c for c in curves if c.name.startswith("eval/")), strict=False):
        for step, value in zip(curve.steps, curve.values, strict=True):
            column, row = dot(step, value)
            cells[row // 4][column // 2] = mark
        legend.append(f"{mark} {curve.name}")
    legend += [f"⠤ {curve.name}" for curve in curves if not curve.name.startswith("eval/")]
    return "\n".join([*_with_axes(cells, low, high, first, last), " " * _LABEL_COLUMNS + "   ".join(legend)])


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    padding = (high - low) * 0.05 or 0.5
    return low - padding, high + padding


def _draw_line(cells: list[list[str]], points: Sequence[tuple[int, int]]) -> None:
    """Join the points by straight lines of dots, (column, row) from the top left."""
    for (column, row), (next_column, next_row) in zip(points, [*points[1:], points[-1]], strict=True):
        num_dots = max(abs(next_column - column), abs(next_row - row), 1)
        for i in range(num_dots + 1):
            x = round(column + (next_column - column) * i / num_dots)
            y = round(row + (next_row - row) * i / num_dots)
            character = cells[y // 4][x // 2]
            bits = ord(character) - _BRAILLE if character != " " else 0
            cells[y // 4][x // 2] = chr(_BRAILLE + (bits | _DOTS[y % 4][x % 2]))


def _with_axes(cells: list[list[str]], low: float, high: float, first: int, last: int) -> list[str]:
    lines = []
    for index, row in enumerate(cells):
        label = ""
        if index in (0, len(cells) // 2, len(cells) - 1):
            label = f"{high - (high - low) * index / (len(cells) - 1):.2f}"
        lines.append(f"{label:>{_LABEL_COLUMNS - 2}} ┤{''.join(row)}".rstrip())
    num_columns = len(cells[0])
    left, right = f"step {first}", str(last)
    lines.append(" " * (_LABEL_COLUMNS - 1) + "└" + "─" * num_columns)
    lines.append(" " * _LABEL_COLUMNS + left + right.rjust(num_columns - len(left)))
    return lines
