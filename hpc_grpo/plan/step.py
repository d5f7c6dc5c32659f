"""The work of a step, and the length of a run in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.config.resources import KEYS_OF_A_TOKEN, budget_of, engines_per_node
from hpc_grpo.data.encoder import held_out_below, prompt_hashes
from hpc_grpo.data.sources import read_items
from hpc_grpo.data.stream import places_per_epoch
from hpc_grpo.driver.schedule import train_length
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.fit import Plan


@dataclass(frozen=True)
class Workload:
    """The work of a step whose sequences all have full length: lengths are unknown before sampling.

    `learner_tokens` are the tokens that learners compute; a shared prompt counts once. Engines and learners get whole
    groups: `sequences_per_engine`, `num_microbatches` and `most_trained` are those of the one with the most.
    """

    num_sequences: int
    max_tokens: int
    max_new_tokens: int
    sequences_per_engine: int
    most_trained: int
    num_microbatches: int
    learner_tokens: int


def workload(plan: Plan) -> Workload | None:
    """Return the work of a step; None without engines (SFT)."""
    config, rollout = plan.config, plan.config.rollout
    if plan.kv_cache is None:
        return None
    sequences, engines = rollout.prompts_per_step * rollout.group_size, plan.num_nodes * engines_per_node(config)
    prompts = rollout.prompts_per_step if budget_of(config).shares_prompts else sequences
    num_learners, times = max(1, plan.num_learners // config.train.sequence_parallel), config.train.num_minibatches
    groups = ceil(rollout.prompts_per_step / (times * num_learners))
    return Workload(
        num_sequences=sequences,
        max_tokens=sequences * config.max_model_len,
        max_new_tokens=sequences * config.most_sampled,
        sequences_per_engine=ceil(rollout.prompts_per_step / engines) * rollout.group_size,
        most_trained=times * groups * rollout.group_size,
        num_microbatches=times * _num_microbatches(config, groups),
        learner_tokens=prompts * config.data.max_prompt_tokens + sequences * config.longest_rollout,
    )


def _num_microbatches(config: Config, groups: int) -> int:
    """Return the microbatches of one learner, or one sequence-parallel group, for groups of longest sequences."""
    budget, longest, group = budget_of(config), config.max_model_len, config.rollout.group_size
    if not budget.shares_prompts:
        return ceil(groups * group / max(1, budget.max_tokens // longest))
    prompt = config.data.max_prompt_tokens
    tokens = max(prompt + group * config.longest_rollout, ceil(group * longest / KEYS_OF_A_TOKEN))
    if tokens <= budget.max_tokens:
        return ceil(groups / (budget.max_tokens // tokens))
    fitting = min(
        (budget.max_tokens - prompt) // config.longest_rollout, KEYS_OF_A_TOKEN * budget.max_tokens // longest
    )
    return groups * ceil(group / max(1, fitting))


def num_steps(plan: Plan) -> int | None:
    """Return the run's length in steps. None if it depends on images, or on data that is no readable local file.

    Includes prompts that data.drop_long_prompts drops, because nothing is tokenized here.
    """
    config = plan.config
    sources, evals = ([source for _, source in config.data.sources(for_eval=which)] for which in (False, True))
    known = evals if config.data.deduplicate else []
    if config.train.total_epochs is None:
        return train_length(config, 1).total_steps
    try:
        if not all(Path(source.path).is_file() for source in (*sources, *known)):
            return None
        if config.data.images is not None and (config.data.held_out is not None or config.data.deduplicate):
            return None  # held-out items and duplicates are told apart by their images too
        sizes = _trained_sizes(config, sources, known)
        return train_length(config, sum(places_per_epoch(sources, sizes))).total_steps
    except ConfigError:
        return None  # data that cannot be read: the check of the inputs says why


def _trained_sizes(config: Config, sources: Sequence[SourceConfig], known: Sequence[SourceConfig]) -> list[int]:
    """Count the items of each source that are not held out and not duplicates, of each other or of `known`."""
    held, drops = config.data.held_out, config.data.deduplicate
    if held is None and not drops:
        return [sum(1 for _ in read_items(source)) for source in sources]
    bound = held_out_below(held or 0.0)
    seen = {number for source in known for number in prompt_hashes(source)}
    sizes = []
    for source in sources:
        ours = [number for number in prompt_hashes(source) if number >= bound]
        sizes.append(len(set(ours) - seen) if drops else len(ours))
        seen.update(ours)
    return sizes
