"""A data source of one's own: a function that yields items, the same ones in the same order each time.

    hpc-grpo train CONFIG data.train.path=examples/data_source.py:products data.train.args='{num_items: 2000}'

Its rows are tokenized once and kept; the function itself is run at every start, and a run whose items are no longer
those it began with is refused.
"""

import random
from collections.abc import Iterator


def products(num_items: int = 1000, largest: int = 9, seed: int = 0) -> Iterator[dict[str, str]]:
    """Ask for products of two numbers up to `largest`."""
    rng = random.Random(seed)
    for _ in range(num_items):
        left, right = rng.randint(2, largest), rng.randint(2, largest)
        yield {"question": f"What is {left} * {right}?", "answer": str(left * right)}
