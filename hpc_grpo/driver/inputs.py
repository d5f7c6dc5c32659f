"""Loads and checks the user's inputs to a run: tokenizer, data sets and rewards.

The checks need neither Ray, torch nor a GPU. They run before any actor starts, so a mistake is found in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.data.loading import load_evals, load_streams
from hpc_grpo.data.stream import DemonstrationStream, PromptStream, Stream, reward_fields
from hpc_grpo.data.templates import PromptTemplate, Tokenizer, prompt_style
from hpc_grpo.data.tokenizer import (
    check_context_length,
    context_length,
    import_without_torch,
    load_tokenizer,
    refuse_other_vocabularies,
    stop_token_ids,
)
from hpc_grpo.episodes.dialogue import Dialogue
from hpc_grpo.episodes.workers import first_answer
from hpc_grpo.errors import ConfigError
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.registry import CALLBACKS, EVAL_METRICS
from hpc_grpo.rewards.sandbox.isolation import refuse_shown
from hpc_grpo.run.adapter import refuse_wrong_lora
from hpc_grpo.system.hugging_face import find_model
from hpc_grpo.system.say import say
from hpc_grpo.weights.contract import refuse_experts, refuse_images, refuse_wrong_experts

_SANDBOXED = {"code", "reasoning_gym"}
"""Rewards that run a model's text. A user's own reward may call them."""


@dataclass(frozen=True)
class Inputs:
    """The loaded inputs. `eval_streams` are the eval sets by name. `stream` is None for an eval apart from training.

    `item_digests` are the digests of the data sets, by their keys in the config.
    """

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    eval_streams: Mapping[str, PromptStream]
    stream: PromptStream | DemonstrationStream | None = None
    item_digests: Mapping[str, str] = field(default_factory=dict)


def load_inputs(config: Config, *, is_resume: bool = False, trains: bool = True) -> Inputs:
    """Load and check the inputs, including the user's functions. Raises ConfigError for the first error.

    On a resume, waits for the servers of rewards. Raises RewardAwayError if one does not answer or a reward is late,
    and LaunchError if the process of an environment, which has begun before, is lost.
    """
    import_without_torch(config)
    tokenizer = load_tokenizer(config)
    check_context_length(config)
    settings = json.loads((find_model(config.model.path) / "config.json").read_text())
    refuse_wrong_experts(settings, config.model.path, config)
    if config.needs.rollouts or config.lora is not None:
        refuse_images(settings, config.model.path, config.data.images)
        refuse_experts(settings, config.model.path, has_adapter=config.lora is not None)
    if trains:
        refuse_wrong_lora(config, find_model(config.model.path))
    refuse_other_vocabularies(config)
    stop_ids = stop_token_ids(config, tokenizer)
    if config.needs.rollouts:
        refuse_shown_files(config)
        with closing(RewardPool(config.all_rewards, num_workers=1)) as pool:
            for note in pool.check(is_resume=is_resume):
                say(note)
        for name in config.eval.metrics:
            EVAL_METRICS.find(name)
    if not trains:
        evals = load_evals(config, tokenizer)
        _check_environments(config, tokenizer, evals.values())
        return Inputs(tokenizer, stop_ids, evals)
    if (callback := config.train.on_step) is not None:
        CALLBACKS.with_args(callback.name, callback.args, 3)
    if config.needs.rollouts:
        config.loss.advantage.check()  # only learners import the loss, which needs torch
    streams = load_streams(config, tokenizer, context=context_length(config))
    _check_environments(config, tokenizer, [streams.train, *streams.evals.values()], is_resume=is_resume)
    return Inputs(tokenizer, stop_ids, streams.evals, streams.train, streams.digests)


def _check_environments(
    config: Config, tokenizer: Tokenizer, streams: Iterable[Stream], *, is_resume: bool = False
) -> None:
    """Begin each environment once, with its first row. Raises ConfigError if the row or its messages are refused."""
    environments = list(config.environments.items())
    for part in (part for stream in streams for part in stream.parts):
        if part.environment is None:
            continue
        key, (source, environment) = environments[part.environment]
        dialogue = Dialogue(tokenizer, prompt_style(config.data, source))
        row = reward_fields(json.loads(part.rows[int(part.numbers[0])].fields), source.answer_field)
        answer = first_answer(key, environment, row, is_resume=is_resume)
        if answer is None:  # an agent makes its own prompts
            continue
        messages = answer.messages or PromptTemplate(config.data, source, tokenizer).messages(row, 0)
        try:
            dialogue.begin(messages, answer.tools)
        except ValueError as error:
            raise ConfigError(f"Environment {environment.name!r}, first row of {key}: {error}.") from error


def refuse_shown_files(config: Config) -> None:
    """Raise ConfigError if a model's programs could read the run or the expected answers."""
    sandboxed = any(reward.name in _SANDBOXED or ":" in reward.name for reward in config.all_rewards)
    if not sandboxed and not config.environments:
        return
    files = [path for _, source in config.data.sources() if (path := Path(source.path)).exists()]
    refuse_shown([config.run_path, *files])
