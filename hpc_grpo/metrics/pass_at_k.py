"""The pass@k estimate of eval."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Chance that at least one of `k` completions solves the prompt, estimated without bias.

    `1 - C(n - c, k) / C(n, k)` for n samples of which c are solved: the share of all k-subsets that hold a
    solved one. Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv:2107.03374), eq. 1.
    Unlike `1 - (1 - c/n)^k` it is not biased low. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k(num_samples=4, num_solved=1, k=2)
    0.5
    """
    if not 0 <= num_solved <= num_samples:
        raise ValueError(f"num_solved = {num_solved} must be between 0 and num_samples = {num_samples}.")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must be between 1 and num_samples = {num_samples}.")
    # Exact integers: the factorials of a few hundred samples do not fit a float.
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)
