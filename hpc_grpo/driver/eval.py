"""Evals on a held-out data set: pass@1 and pass@k, and the completions themselves.

Produces metrics and rollouts/eval_step_N.jsonl. Runs between two steps, on the engines of training, with seeds that
depend on the prompt alone so that evals of one run compare.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import comb
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.data.seeds import sampling_seed
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.length import TrainLength
from hpc_grpo.driver.rollouts import check_failures
from hpc_grpo.driver.sampling import GradedGroup, RolloutPool
from hpc_grpo.driver.schedule import Schedule
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt, SamplingSpec

_EVAL_SEED_OFFSET = 1_000_003
"""Keeps eval's sampling seeds apart from those of training."""


class Evaluation:
    """Samples `eval.num_samples` completions of every eval prompt and grades them."""

    def __init__(
        self, config: Config, stream: PromptStream, pool: RolloutPool, run_dir: RunDir, length: TrainLength
    ) -> None:
        self._config = config
        self._total_steps = length.total_steps
        self._schedule = Schedule(config.eval.every, length)
        self._stream = stream
        self._pool = pool
        self._run_dir = run_dir

    def is_due(self, step: int, in_s: float = 0.0) -> bool:
        """Tell whether to evaluate after `step`, which ends in `in_s` seconds: at both ends, and as the config says."""
        return step in (0, self._total_steps) or self._schedule.is_due(step, in_s)

    def run(self, step: int) -> dict[str, float]:
        """Measure `eval/pass@k`, `eval/reward_mean`, `eval/failed_fraction` and `eval/tokens_mean` at `step`.

        The first two leave out the prompts whose reward failed, and are absent where none is left;
        `eval/failed_fraction` is their share. Raises RewardError when more failed than allowed.
        """
        prompts = [self._stream.prompt(ordinal) for ordinal in range(len(self._stream))]
        requests = [self._request(prompt) for prompt in prompts]
        groups = self._pool.wait(self._pool.start(prompts, requests, [True] * len(prompts)), "eval")
        # Else training would meet prefixes cached here, which a resumed run, without this eval, does not.
        self._pool.forget_prefixes()
        check_failures([group.grades for group in groups], self._config.grading.max_failed_fraction)
        text = "".join(json.dumps(line) + "\n" for group in groups for line in self._lines(group))
        when_there_is_space(lambda: write_atomic(self._run_dir.eval_rollouts(step), text), "the eval's completions")
        self._schedule.start_over()
        return self._metrics(groups)

    def _request(self, prompt: Prompt) -> GroupRequest:
        rollout, settings, seed = self._config.rollout, self._config.eval, self._config.run.seed + _EVAL_SEED_OFFSET
        seeds = tuple(sampling_seed(seed, prompt.ordinal, index, 0) for index in range(settings.num_samples))
        sampling = SamplingSpec(rollout.max_new_tokens, rollout.min_new_tokens, settings.temperature)
        return GroupRequest(prompt.ordinal, prompt.token_ids, seeds, sampling)

    def _solved(self, group: GradedGroup) -> list[bool]:
        rewards = deciding_rewards(group.grades, self._config.eval.reward)
        return [reward >= self._config.eval.solved_at for reward in rewards]

    def _metrics(self, groups: Sequence[GradedGroup]) -> dict[str, float]:
        # Not by `valid`: a completion that rollout.mask_truncated masks was graded all the same.
        graded = [group for group in groups if not group.grades.errors]
        tokens = [count for group in groups for count in group.grades.num_completion_tokens]
        return {
            **(self._metrics_of_graded(graded) if graded else {}),
            "eval/failed_fraction": 1.0 - len(graded) / len(groups),
            "eval/tokens_mean": sum(tokens) / len(tokens),
        }

    def _metrics_of_graded(self, groups: Sequence[GradedGroup]) -> dict[str, float]:
        num_samples = self._config.eval.num_samples
        solved = [sum(self._solved(group)) for group in groups]
        metrics = {
            f"eval/pass@{k}": sum(pass_at_k(num_samples, count, k) for count in solved) / len(groups)
            for k in sorted({1, *self._config.eval.pass_k})
        }
        rewards = [reward for group in groups for reward in group.grades.rewards]
        return {**metrics, "eval/reward_mean": sum(rewards) / len(rewards)}

    def _lines(self, group: GradedGroup) -> list[dict[str, Any]]:
        """Describe each completion; reward and solved are None where the reward failed."""
        grades = group.grades
        graded = zip(grades.texts, grades.rewards, self._solved(group), strict=True)
        return [
            {
                "ordinal": group.prompt.ordinal,
                "source": group.prompt.source,
                "sample": index,
                "prompt": group.prompt.text,
                "answer": group.prompt.fields.get("answer"),
                "completion": text,
                "reward": None if grades.errors else reward,
                "solved": None if grades.errors else solved,
            }
            for index, (text, reward, solved) in enumerate(graded)
        ]


def deciding_rewards(grades: GroupGrades, name: str) -> Sequence[float]:
    """Return the rewards `[G]` that decide what is solved: those of `name`, else of its source's first reward."""
    of_name = (parts for label, parts in grades.reward_parts.items() if label.partition("#")[0] == name)
    return next(of_name, next(iter(grades.reward_parts.values())))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of `k` completions solves the prompt.

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
