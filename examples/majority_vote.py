"""An eval metric of your own: how often the answer that most completions of a prompt give is the right one.

Self-consistency (Wang et al. 2022, arXiv:2203.11171); with 8 samples of each prompt it comes as eval/majority@8:

    hpc-grpo train CONFIG eval.num_samples=8 eval.metrics='[examples/majority_vote.py:majority_vote]'
"""

from collections import Counter

from hpc_grpo.rewards.answers import given_answer


def majority_vote(groups):
    """Return the share of prompts whose most frequent answer is right; of answers given as often, the first counts."""
    right = [is_right(group) for group in groups]
    return {f"majority@{len(groups[0].completions)}": sum(right) / len(right)}


def is_right(group):
    """Tell whether a completion with the most frequent answer solves the prompt."""
    answers = [given_answer(completion) for completion in group.completions]
    (winner, _), *_ = Counter(answers).most_common(1)
    return group.solved[answers.index(winner)]
