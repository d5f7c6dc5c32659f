"""Evals on held-out data sets: their metrics, and the completions themselves.

Produces metrics and, for each set, rollouts/eval_step_N.jsonl. Runs between two steps, on the engines of training, with
seeds that depend on the prompt alone so that evals of one run compare. With a policy lag rollouts are under way beside
it, and its prompts come before theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.data.seeds import sampling_seed
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.length import TrainLength
from hpc_grpo.driver.rollouts import check_failures
from hpc_grpo.driver.sampling import GradedGroup, RolloutPool
from hpc_grpo.driver.schedule import Schedule
from hpc_grpo.metrics.evals import EvalGroup, eval_metrics
from hpc_grpo.metrics.rollouts import solved
from hpc_grpo.registry import EVAL_METRICS
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupRequest, Prompt

_EVAL_SEED_OFFSET = 1_000_003
"""Keeps eval's sampling seeds apart from those of training."""


class EvalSets:
    """Samples `eval.num_samples` completions of every prompt of the eval sets and grades them."""

    def __init__(self, config: Config, streams: Mapping[str, PromptStream], pool: RolloutPool) -> None:
        self._config = config
        self._streams = streams
        self._pool = pool
        self._is_beside_training = config.rollout.max_policy_lag > 0
        self._own_metrics = {name: EVAL_METRICS.find(name) for name in config.eval.metrics}

    def run(self, file_of: Callable[[str], Path]) -> dict[str, float]:
        """Measure each set, `eval/NAME` or `eval/SET/NAME` (see `eval_metrics`); `file_of` a set takes its completions.

        Raises RewardError when rewards failed for more prompts of a set than allowed.
        """
        return self.measure(self.sample(), file_of)

    def sample(self) -> dict[str, list[EvalGroup]]:
        """Sample and grade all sets at once: none changes what another one gets. Raises RewardError as `run` does."""
        prompts = {
            name: [stream.prompt(ordinal) for ordinal in range(len(stream))] for name, stream in self._streams.items()
        }
        every = [prompt for of_set in prompts.values() for prompt in of_set]
        requests = [self._request(name, prompt) for name, of_set in prompts.items() for prompt in of_set]
        groups = iter(self._pool.wait(self._pool.start(every, requests, [True] * len(every)), "eval"))
        if not self._is_beside_training:
            # Else training would meet prefixes cached here, which a resumed run, without this eval, does not.
            self._pool.forget_prefixes()
        return {name: self._checked([next(groups) for _ in of_set]) for name, of_set in prompts.items()}

    def measure(self, sampled: Mapping[str, Sequence[EvalGroup]], file_of: Callable[[str], Path]) -> dict[str, float]:
        """Return the metrics of all sets, and write down their completions."""
        metrics: dict[str, float] = {}
        for name, groups in sampled.items():
            metrics |= self._measure(name, groups, file_of(name))
        return metrics

    def _checked(self, graded: Sequence[GradedGroup]) -> list[EvalGroup]:
        check_failures([group.grades for group in graded], self._config.grading.max_failed_fraction)
        return [self._eval_group(group) for group in graded]

    def _measure(self, name: str, groups: Sequence[EvalGroup], file: Path) -> dict[str, float]:
        text = "".join(
            json.dumps({"ordinal": ordinal, **line}) + "\n"
            for ordinal, group in enumerate(groups)
            for line in _lines(group)
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        when_there_is_space(lambda: write_atomic(file, text), "the eval's completions")
        metrics = eval_metrics(groups, self._config.eval_settings(name), self._own_metrics)
        return {f"eval/{name}/{key}" if name else f"eval/{key}": value for key, value in metrics.items()}

    def _request(self, name: str, prompt: Prompt) -> GroupRequest:
        rollout, settings = self._config.rollout, self._config.eval_settings(name)
        seed = self._config.run.seed + _EVAL_SEED_OFFSET
        seeds = tuple(sampling_seed(seed, prompt.ordinal, index, 0) for index in range(settings.num_samples))
        assert settings.top_p is not None, "eval_settings resolves it"
        sampling = rollout.sampling(settings.temperature, settings.top_p)
        return GroupRequest(prompt.ordinal, prompt.token_ids, seeds, sampling, is_urgent=self._is_beside_training)

    def _eval_group(self, group: GradedGroup) -> EvalGroup:
        prompt, grades = group.prompt, group.grades
        return EvalGroup(
            prompt.text,
            prompt.source,
            prompt.fields,
            grades.texts,
            grades.rewards,
            solved(grades, self._config.eval),
            grades.num_completion_tokens,
            # Not by `valid`: a completion that rollout.mask_truncated masks was graded all the same.
            is_graded=not grades.errors,
        )


class Evaluation:
    """The evals of a run, as often as the config says."""

    def __init__(self, config: Config, sets: EvalSets, run_dir: RunDir, length: TrainLength) -> None:
        self._total_steps = length.total_steps
        self._schedule = Schedule(config.eval.every, length)
        self._sets = sets
        self._run_dir = run_dir

    def is_due(self, step: int, in_s: float = 0.0) -> bool:
        """Tell whether to evaluate after `step`, which ends in `in_s` seconds: at both ends, and as the config says."""
        return step in (0, self._total_steps) or self._schedule.is_due(step, in_s)

    def run(self, step: int) -> dict[str, float]:
        """Measure the policy after `step`. Raises RewardError when rewards failed for more prompts than allowed."""
        metrics = self._sets.run(lambda name: self._run_dir.eval_rollouts(step, name))
        self._schedule.start_over()
        return metrics


def _lines(group: EvalGroup) -> list[dict[str, Any]]:
    """Describe each completion; reward and solved are None where the reward failed."""
    return [
        {
            "source": group.source,
            "sample": index,
            "prompt": group.prompt,
            "answer": group.fields.get("answer"),
            "completion": completion,
            "reward": group.rewards[index] if group.is_graded else None,
            "solved": group.solved[index] if group.is_graded else None,
        }
        for index, completion in enumerate(group.completions)
    ]
