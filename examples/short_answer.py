"""A reward of your own, in a file outside the package: a right answer is worth more when it is short.

Try it: hpc-grpo reward test examples/short_answer.py:short_answer --prompt '6*7?' --completion 42 --answer 42
Train with it: rewards: [{name: examples/short_answer.py:short_answer, args: {free_words: 40}}]
"""

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import score


def short_answer(prompts, completions, answer, free_words=20, **columns):
    """Return 1.0 for a right answer of up to `free_words` words, less for a longer one, 0.0 for a wrong one."""
    right = score("math", completions, {"answer": answer[0]})
    lengths = [max(len(text.split()), free_words) for text in completions]
    return [one * free_words / length for one, length in zip(right, lengths, strict=True)]


def prepare(free_words=20):
    """Refuse, before training starts, what could not work; tell the user what is wanted."""
    if free_words < 1:
        raise ConfigError(f"free_words is {free_words}; set rewards.N.args.free_words to 1 or more.")
    return f"answers of up to {free_words} words are worth most"


short_answer.prepare = prepare
