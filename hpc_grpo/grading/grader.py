"""The grader actor: decodes sampled tokens and sends them to reward workers.

Runs in a Ray actor, one on each node with engines, and grades many groups at once in its event loop. Takes
`GroupSamples`, returns `GroupGrades`. Waits for the slowest of the group's rewards, or its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpc_grpo.config import Config
from hpc_grpo.data.images import thumbnail
from hpc_grpo.grading.pool import RewardPool, labelled
from hpc_grpo.metrics.rollouts import measure
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from hpc_grpo.run.pulse import PULSE, patience_of_actor
from hpc_grpo.run.stacks import dump_stacks_on_signal
from hpc_grpo.system.usage import METER, Usage
from hpc_grpo.types import Completion, Episode, GroupGrades, GroupSamples, Prompt

ENVIRONMENT_PART = "environment"
"""Name of the environment's reward in `reward_parts`: the sum over the turns of an episode."""


class Grader:
    """Grades groups by the rewards of their source in `config.grading.num_workers` processes.

    `decode` is the tokenizer's (data/tokenizer.py, `decoder_of`).
    """

    def __init__(self, config: Config, decode: Callable[..., str]) -> None:
        dump_stacks_on_signal("grader")
        PULSE.open("grader", patience_of_actor(config))
        self._run_dir, self._decode = RunDir(config.run_path), decode
        self._mask_truncated = config.rollout.mask_truncated
        self._pool = RewardPool(config.all_rewards, config.grading.num_workers)
        self._rewards = labelled(config.reward_sets)
        self._without_images: dict[str, list[bytes]] = {} if config.data.images is None else {"images": []}
        self._num_open = 0

    async def ready(self) -> None:
        """Wait until the rewards are imported and prepared in a worker. Raises ConfigError if this fails.

        On a resume, raises RewardAwayError if a reward is late, or its server does not answer.
        """
        is_resume = read_state(self._run_dir) is not None
        await asyncio.to_thread(self._pool.check, is_resume=is_resume)

    async def usage(self) -> tuple[Usage, list[Usage | None]]:
        """Return the usage since the last call: the grader's own, and each reward worker's."""
        return METER.read(with_children=False), self._pool.usage()

    def close(self) -> None:
        self._pool.close()

    async def grade(self, samples: GroupSamples, prompt: Prompt, with_texts: bool) -> GroupGrades:
        """Grade one group. `with_texts` keeps the decoded completions.

        With `rollout.mask_truncated`, a truncated completion is not valid but keeps its reward. An episode whose
        environment failed is not valid and gets the reward 0.0. Raises RewardError if a reward breaks its contract.
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
        episodes = samples.episodes
        answers = tuple(self._text(episode.turns[-1:]) for episode in episodes)
        rewards = self._rewards[prompt.reward_set]
        images = await prompt.images if prompt.images else ()
        fields = prompt.fields if images else {**self._without_images, **prompt.fields}
        outcome = await self._pool.submit(prompt.text, answers, fields, rewards, images).wait()
        parts, totals = outcome.parts, outcome.rewards
        turn_rewards: tuple[tuple[float, ...], ...] = ()
        if prompt.environment is not None:
            turn_rewards = tuple(tuple(turn.reward for turn in episode.turns) for episode in episodes)
            parts = {**parts, ENVIRONMENT_PART: tuple(map(sum, turn_rewards))}
            if not outcome.errors:
                totals = tuple(map(sum, zip(parts[ENVIRONMENT_PART], totals, strict=True)))
        failures = tuple(episode.failure for episode in episodes)
        truncated = tuple(episode.finish_reason == "length" for episode in episodes)
        masked = [bool(own) or (cut and self._mask_truncated) for own, cut in zip(failures, truncated, strict=True)]
        of_turns = [[turn.policy_versions for turn in own.turns] or [np.array([-1])] for own in episodes]
        versions = [np.concatenate(own) for own in of_turns]
        prompt_ids: list[int] = next((own.turns[0].context_ids.tolist() for own in episodes if own.turns), [])
        thumbnails = await asyncio.to_thread(lambda: tuple(map(thumbnail, images))) if images and with_texts else ()
        is_shown = with_texts and prompt.environment is not None
        return GroupGrades(
            ordinal=samples.ordinal,
            rewards=tuple(0.0 if failure else own for failure, own in zip(failures, totals, strict=True)),
            reward_parts=parts,
            valid=tuple(valid and not own for valid, own in zip(outcome.valid, masked, strict=True)),
            num_completion_tokens=tuple(episode.num_sampled_tokens for episode in episodes),
            truncated=truncated,
            min_policy_versions=tuple(int(own.min()) for own in versions),
            mean_policy_versions=tuple(float(own.mean()) for own in versions),
            measures=measure(episodes, answers, in_environment=prompt.environment is not None),
            texts=tuple(self._text(episode.turns) for episode in episodes) if with_texts else (),
            errors=tuple(f"prompt {samples.ordinal}, {error}" for error in outcome.errors),
            timed_out=outcome.timed_out,
            over_budget=outcome.over_budget,
            turn_rewards=turn_rewards,
            shown_prompt=self._decode(prompt_ids, skip_special_tokens=False) if is_shown else "",
            shown_turns=tuple(tuple(self._shown(episode)) for episode in episodes) if is_shown else (),
            thumbnails=thumbnails,
            num_prompt_tokens=len(prompt_ids),
            num_observed_tokens=tuple(sum(len(turn.context_ids) for turn in episode.turns[1:]) for episode in episodes),
            num_sequences=tuple(episode.num_sequences for episode in episodes),
            failures=failures,
        )

    def _text(self, turns: Sequence[Completion]) -> str:
        """Return the model's text of one turn, without special tokens.

        For several turns, return all text after the first prompt, with observations and special tokens.
        """
        ids = [token for turn in turns for token in (*turn.context_ids.tolist(), *turn.token_ids.tolist())]
        return self._decode(ids[len(turns[0].context_ids) :] if turns else [], skip_special_tokens=len(turns) == 1)

    def _shown(self, episode: Episode) -> Iterator[tuple[str, str]]:
        for number, turn in enumerate(episode.turns):
            told = self._decode(turn.context_ids.tolist(), skip_special_tokens=True).strip() if number else ""
            yield told, self._decode(turn.token_ids.tolist(), skip_special_tokens=True)
