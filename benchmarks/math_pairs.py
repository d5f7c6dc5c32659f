"""Pairs a second that `math` judges in a pool of two workers: plain numbers, and notation for math-verify.

`python benchmarks/math_pairs.py`. Every pair differs from the others: groups whose completions agree are faster.
"""

from __future__ import annotations

import time

from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool

NUM_GROUPS, GROUP_SIZE, NUM_WORKERS = 100, 8, 2
KINDS = {
    "plain numbers": ("{}.0", "{}"),
    "fractions": (r"\frac{{{}}}{{7}}", "{}/7"),
    "roots": (r"\sqrt{{{}}}", r"\sqrt{{4*{}}}/2"),
    "sets": (r"\{{1, {}, 2\}}", r"\{{2, 1, {}\}}"),
    "polynomials": ("x^2 + {}x + 1", "1 + {}x + x^2"),
}


def main() -> None:
    pool = RewardPool([RewardConfig(name="math", timeout_s=300.0)], NUM_WORKERS)
    try:
        for kind, (given, answer) in KINDS.items():
            warm = [pool.submit("q", [rf"\boxed{{{given.format(3)}}}"], {"answer": answer.format(3)}) for _ in range(8)]
            assert all(outcome.result().rewards == (1.0,) for outcome in warm), kind
            started = time.perf_counter()
            outcomes = []
            for group in range(NUM_GROUPS):
                numbers = range(group * GROUP_SIZE + 5, (group + 1) * GROUP_SIZE + 5)
                boxed = [rf"\boxed{{{given.format(number)}}}" for number in numbers]
                outcomes.append(pool.submit("q", boxed, {"answer": answer.format(numbers[0])}))
            right = sum(sum(outcome.result().rewards) for outcome in outcomes)
            pairs_per_s = NUM_GROUPS * GROUP_SIZE / (time.perf_counter() - started)
            print(f"{kind:<14} {pairs_per_s:8.0f} pairs/s  {right:.0f} of {NUM_GROUPS * GROUP_SIZE} equal")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
