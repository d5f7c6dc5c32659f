"""The page's colours as people with each kind of colour blindness see them, by computation."""

from __future__ import annotations

from itertools import combinations, islice

import numpy as np
import pytest

from hpc_grpo.report.figure import PALETTE, curve_styles

LEAST_DISTANCE = 15.0
"""In units of CIE 1976 L*a*b*, of which one sees 2.3 side by side (Mahy et al. 1994)."""

MACHADO = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Kind of vision -> matrix on linear sRGB, severity 1.0: Machado, Oliveira and Fernandes 2009, table 1."""

SRGB_TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]


def seen(color: str, vision: str) -> np.ndarray:
    """L*a*b* [3] of a colour #RRGGBB, under daylight (D65)."""
    srgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    simulated = np.clip(np.asarray(MACHADO[vision]) @ linear, 0.0, 1.0)
    matrix = np.asarray(SRGB_TO_XYZ)
    relative = (matrix @ simulated) / matrix.sum(axis=1)
    x, y, z = np.where(relative > (6 / 29) ** 3, np.cbrt(relative), relative / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(seen(one, vision) - seen(other, vision)))


def test_the_computation_knows_white_black_and_the_classic_confusion() -> None:
    assert seen("#FFFFFF", "full") == pytest.approx([100.0, 0.0, 0.0], abs=0.01)
    assert seen("#000000", "protanopia") == pytest.approx([0.0, 0.0, 0.0], abs=0.01)
    red, green = "#D62728", "#2CA02C"
    assert distance(red, green, "full") > 100.0 > 10.0 > distance(red, green, "deuteranopia")


@pytest.mark.parametrize("vision", MACHADO)
def test_curves_are_told_apart_by_colour_whatever_colours_one_sees(vision: str) -> None:
    distances = {pair: distance(*pair, vision) for pair in combinations(PALETTE, 2)}
    closest = min(distances, key=distances.__getitem__)
    assert distances[closest] > LEAST_DISTANCE, closest


def test_curves_of_one_colour_have_different_lines() -> None:
    styles = list(islice(curve_styles(), 28))
    assert len(set(styles)) == 28
    assert {line for _, line in styles[:7]} == {"-"}
