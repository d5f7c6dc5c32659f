"""Foreign text is spelled out where it would act on a terminal, and stays as it is elsewhere."""

from __future__ import annotations

import unicodedata

import pytest

from hpc_grpo.system.readable import printable
from hpc_grpo.system.say import ForeignOutput, undrawn


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;ZXZpbA==\x07", r"\x1b]52;c;ZXZpbA==\x07"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("\x9b6n\x90q\x9c", r"\x9b6n\x90q\x9c"),
        ("wrong\rright", r"wrong\x0dright"),
        ("a\bb\x00\x7f", r"a\x08b\x00\x7f"),
        ("\u202egnp.exe\u2066x\u2069", r"\u202egnp.exe\u2066x\u2069"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("half \ud83d", r"half \ud83d"),
        ("tag \U000e0041", r"tag \U000e0041"),
        ("so\xadft\u115f\u3164", r"so\xadft\u115f\u3164"),
        ("a\ufe0f\U000e0101", r"a\ufe0f\U000e0101"),
        ("pay\u200dpal 👩\u200d\u200d", "pay\\u200dpal 👩\u200d\\u200d"),
        ("❤\ufe0f\u200d🔥 \u0645\u06cc\u200c\u062e", "❤\ufe0f\u200d🔥 \u0645\u06cc\u200c\u062e"),
        ("one\r\ntwo\n\tthree", "one\ntwo\n\tthree"),
        ("naïve 答 ✓ 👩\u200d🔬 ⣿", "naïve 答 ✓ 👩\u200d🔬 ⣿"),
    ],
)
def test_a_text_cannot_act_on_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).encode()


def test_no_character_passes_that_nobody_sees() -> None:
    """By Unicode's categories of controls and formats; signs of Arabic and other numbers are seen, though formats."""
    seen = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)}
    hidden = [
        code
        for code in range(0x110000)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in {*seen, 9, 10}
    ]
    assert [hex(code) for code in hidden if printable(f"a{chr(code)}b") == f"a{chr(code)}b"] == []


def test_an_endless_line_is_cut_and_others_are_not() -> None:
    text = printable("short\n" + "x" * 50_000 + "\nshort")
    assert text == "short\n" + "x" * 20_000 + "… (30,000 more)\nshort"
    assert printable("x" * 50_000, longest_line=None) == "x" * 50_000


PROGRAM = "\x1b[?25l\x1b[1;32mstep 1\x1b[0m\r\n\x1b]0;owned\x07\x1b[6n\x1b[?1049h 10 %\r20 %\r\n答".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(PROGRAM)])
def test_drawing_is_left_out_and_acting_is_shown_however_the_bytes_come(size: int) -> None:
    output = ForeignOutput()
    pieces = [output.take(PROGRAM[start : start + size]) for start in range(0, len(PROGRAM), size)]
    text = "".join([*pieces, output.take(b"", final=True)])
    assert text == PROGRAM.decode()
    assert undrawn(text) == "step 1\n" + r"\x1b]0;owned\x07\x1b[6n\x1b[?1049h" + " 10 %\n20 %\n答"


def test_an_escape_sequence_without_end_is_not_waited_for() -> None:
    output = ForeignOutput()
    assert output.take(b"\x1b[" + b"0" * 100) == "\x1b[" + "0" * 100
