from __future__ import annotations

from hpc_grpo.report.terminal_plot import Curve, plot


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    text = plot([Curve("reward/mean", (0, 10), (0.0, 1.0))], num_columns=10, num_rows=4)
    assert text.splitlines() == [
        "  1.05 ┤        ⡠⠔",
        "       ┤     ⡠⠔⠉",
        "  0.32 ┤  ⣀⠔⠊",
        " -0.05 ┤⠔⠊",
        "       └──────────",
        "        step 0  10",
        "        ⠤ reward/mean",
    ]


def test_one_point_and_a_constant_can_be_drawn() -> None:
    assert "●" in plot([Curve("eval/pass@1", (0,), (0.5,))])
    assert "⠤" in plot([Curve("reward/mean", (1, 2, 3), (0.5, 0.5, 0.5))])
