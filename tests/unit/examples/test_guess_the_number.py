from __future__ import annotations

from pathlib import Path

from hpc_grpo.episodes.builtin import environment_of

FILE = Path(__file__).parents[3] / "examples" / "guess_the_number.py"


def test_halving_finds_each_number_in_three_guesses_or_four() -> None:
    num_guesses = set()
    for seed in range(40):
        game = environment_of(f"{FILE}:GuessTheNumber", {"highest": 8})
        first = game.reset({}, seed)
        assert "from 1 to 8" in str(first)
        assert game.step("Is it five?").metrics == {"unreadable": 1}
        low, high, number = 1, 8, 0
        while True:
            guess, number = (low + high) // 2, number + 1
            turn = game.step(f"[{guess}]")
            if turn.done:
                break
            low, high = (guess + 1, high) if turn.observation == "Higher." else (low, guess - 1)
        assert turn.reward == 1.0
        num_guesses.add(number)
    assert num_guesses == {1, 2, 3, 4}


def test_it_takes_less_than_thirty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 30
