from __future__ import annotations

from pathlib import Path

from tests.support.command import call

FILE = Path(__file__).parents[3] / "examples" / "short_answer.py"
WORDS = ("reward", "test", f"{FILE}:short_answer", "--prompt", "6*7?", "--answer", "42", "--arg", "free_words=2")


def test_a_reward_outside_the_package_prefers_short_right_answers() -> None:
    completions = ("--completion", "42", "--completion", "It is 6*7, so 42", "--completion", "41")
    done = call(*WORDS, *completions)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "0.4", "0"]
    assert "answers of up to 2 words are worth most" in done.stderr


def test_it_refuses_before_training_what_could_not_work() -> None:
    done = call(*WORDS[:-1], "free_words=0", "--completion", "42")
    assert done.exit_code == 78
    assert "free_words is 0" in done.stderr


def test_it_takes_less_than_thirty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 30
