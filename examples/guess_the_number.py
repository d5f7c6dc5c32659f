"""An environment of one's own: the model guesses a number, and is told whether it is higher or lower.

    hpc-grpo train CONFIG environment='{name: examples/guess_the_number.py:GuessTheNumber, max_turns: 3}'

Each row of the data set is an episode; its number follows from the seed, which all rollouts of a group share.
"""

import random
import re

from hpc_grpo import Turn


class GuessTheNumber:
    def __init__(self, highest=8):
        self.highest = highest

    def reset(self, row, seed):
        self.secret = random.Random(seed).randint(1, self.highest)
        return f"I think of a number from 1 to {self.highest}. Write your guess in brackets, such as [{self.highest}]."

    def step(self, message):
        guess = re.search(r"\[(\d{1,9})\]", message)
        if guess is None:
            return Turn("Write a number in brackets.", metrics={"unreadable": 1})
        if int(guess[1]) == self.secret:
            return Turn(reward=1.0, done=True)
        return Turn("Higher." if int(guess[1]) < self.secret else "Lower.")
