"""The grader actor: decodes sampled tokens and has them scored.

Runs in a Ray actor, one on each node with engines; many groups are graded at once in its event loop. Consumes
`GroupSamples`, produces `GroupGrades`. Waits for the slowest of the group's rewards, or its deadline.
"""

from __future__ import annotations

import asyncio

from hpc_grpo.config import Config
from hpc_grpo.data.templates import Tokenizer
from hpc_grpo.grading.pool import RewardPool, labelled
from hpc_grpo.metrics.rollouts import measure
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from hpc_grpo.run.pulse import PULSE, patience_of_actor
from hpc_grpo.run.stacks import dump_stacks_on_signal
from hpc_grpo.system.usage import METER, Usage
from hpc_grpo.types import GroupGrades, GroupSamples, Prompt


class Grader:
    """Grades groups by the rewards of their source in `config.grading.num_workers` processes."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        dump_stacks_on_signal("grader")
        PULSE.open("grader", patience_of_actor(config))
        self._run_dir, self._tokenizer = RunDir(config.run_path), tokenizer
        self._mask_truncated = config.rollout.mask_truncated
        self._pool = RewardPool(config.all_rewards, config.grading.num_workers)
        self._rewards = labelled(config.reward_sets)
        self._num_open = 0

    async def ready(self) -> None:
        """Return once a worker has the rewards. Raises ConfigError when one cannot be imported, or RewardAwayError."""
        is_resume = read_state(self._run_dir) is not None
        await asyncio.to_thread(self._pool.check, is_resume=is_resume)

    async def usage(self) -> tuple[Usage, list[Usage | None]]:
        """Return what it used itself since the call before, and what each of its reward workers did."""
        return METER.read(with_children=False), self._pool.usage()

    def close(self) -> None:
        self._pool.close()

    async def grade(self, samples: GroupSamples, prompt: Prompt, with_texts: bool) -> GroupGrades:
        """Grade one group; `with_texts` keeps the decoded completions.

        A truncated completion is not valid under `rollout.mask_truncated`; its reward stays, since it was
        computed. Raises RewardError when a reward breaks its contract.
        """
        if samples.ordinal != prompt.ordinal:
            raise ValueError(f"samples of prompt {samples.ordinal} were given with prompt {prompt.ordinal}.")
        if not self._num_open:
            PULSE.turn_to("grading")
        self._num_open += 1
        try:
            return await self._grades(samples, prompt, with_texts)
        finally:
            self._num_open -= 1
            if self._num_open:
                PULSE.beat()
            else:
                PULSE.turn_to("")

    async def _grades(self, samples: GroupSamples, prompt: Prompt, with_texts: bool) -> GroupGrades:
        completions = samples.completions
        texts = tuple(self._text(completion.token_ids.tolist()) for completion in completions)
        rewards = self._rewards[prompt.reward_set]
        outcome = await self._pool.submit(prompt.text, texts, prompt.fields, rewards).wait()
        truncated = tuple(completion.finish_reason == "length" for completion in completions)
        masked = (cut and self._mask_truncated for cut in truncated)
        return GroupGrades(
            ordinal=samples.ordinal,
            rewards=outcome.rewards,
            reward_parts=outcome.parts,
            valid=tuple(valid and not own for valid, own in zip(outcome.valid, masked, strict=True)),
            num_completion_tokens=tuple(len(completion.token_ids) for completion in completions),
            truncated=truncated,
            min_policy_versions=tuple(int(completion.policy_versions.min()) for completion in completions),
            mean_policy_versions=tuple(float(completion.policy_versions.mean()) for completion in completions),
            measures=measure(completions, texts),
            texts=texts if with_texts else (),
            errors=tuple(f"prompt {samples.ordinal}, {error}" for error in outcome.errors),
            timed_out=outcome.timed_out,
            over_budget=outcome.over_budget,
        )

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
