"""Count what a step works on, and read how long steps took that a run has taken already.

Nobody knows before sampling how long completions get: tokens are those of sequences as long as may be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.config.resources import KEYS_OF_A_TOKEN, budget_of, engines_per_node
from hpc_grpo.data.encoder import check_item, held_out_below, prompt_hash
from hpc_grpo.data.order import places_per_epoch
from hpc_grpo.data.sources import read_items
from hpc_grpo.driver.length import train_length
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.fit import Plan
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics, read_state

_STEP_TIME = "time/step_s"


@dataclass(frozen=True)
class Workload:
    """The sequences and tokens of a step. The two `max_` count a step of longest sequences; None: SFT.

    `learner_tokens` are those of `max_tokens` that learners compute: a shared prompt's once.
    `num_microbatches` is what one learner trains on.
    """

    num_sequences: int
    max_tokens: int | None
    max_new_tokens: int | None
    sequences_per_engine: int
    num_microbatches: int | None
    learner_tokens: int | None = None


@dataclass(frozen=True)
class MeasuredSteps:
    """The newest attempt's steps. `num_nodes` is what they ran on; None where the attempt's record is gone."""

    median_step_s: float
    num_steps: int
    attempt: int
    num_nodes: int | None
    num_remaining_steps: int | None

    def node_hours_left(self, planned_nodes: int) -> float | None:
        """Return steps x seconds x nodes / 3600, on the nodes measured; None where the run's length is not known."""
        if self.num_remaining_steps is None:
            return None
        nodes = self.num_nodes or planned_nodes
        return self.num_remaining_steps * self.median_step_s * nodes / 3600


def workload(plan: Plan) -> Workload:
    config, cache = plan.config, plan.kv_cache
    if cache is None:
        return Workload(config.sft.batch_size, None, None, 0, None)
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    engines = plan.num_nodes * engines_per_node(config)
    prompts = config.rollout.prompts_per_step if budget_of(config).shares_prompts else sequences
    return Workload(
        num_sequences=sequences,
        max_tokens=sequences * config.max_model_len,
        max_new_tokens=sequences * config.rollout.max_new_tokens,
        sequences_per_engine=ceil(sequences / engines),
        num_microbatches=_num_microbatches(config, plan.num_learners),
        learner_tokens=prompts * config.data.max_prompt_tokens + sequences * config.rollout.max_new_tokens,
    )


def _num_microbatches(config: Config, num_learners: int) -> int:
    """Return the most that one learner trains on in a step of longest sequences."""
    budget, longest, group = budget_of(config), config.max_model_len, config.rollout.group_size
    if not budget.shares_prompts:
        sequences = ceil(config.rollout.prompts_per_step * group / num_learners)
        return ceil(sequences / max(1, budget.max_tokens // longest))
    groups, prompt = ceil(config.rollout.prompts_per_step / num_learners), config.data.max_prompt_tokens
    tokens = max(prompt + group * config.rollout.max_new_tokens, ceil(group * longest / KEYS_OF_A_TOKEN))
    if tokens <= budget.max_tokens:
        return ceil(groups / (budget.max_tokens // tokens))
    fitting = min(
        (budget.max_tokens - prompt) // config.rollout.max_new_tokens, KEYS_OF_A_TOKEN * budget.max_tokens // longest
    )
    return groups * ceil(group / max(1, fitting))


def num_steps(plan: Plan) -> int | None:
    """Return the run's length; None where it depends on data that is no file here, or no readable one.

    Prompts that data.drop_long_prompts drops are counted: nothing is tokenized here.
    """
    config = plan.config
    sources = [source for _, source in config.data.sources(for_eval=False)]
    known = [source for _, source in config.data.sources(for_eval=True)] if config.data.deduplicate else []
    if config.train.total_epochs is None:
        return train_length(config, 1).total_steps
    try:
        if not all(Path(source.path).is_file() for source in (*sources, *known)):
            return None
        sizes = _trained_sizes(config, sources, known)
        return train_length(config, sum(places_per_epoch(sources, sizes))).total_steps
    except ConfigError:
        return None  # data that cannot be read: the check of the inputs says why


def _trained_sizes(config: Config, sources: Sequence[SourceConfig], known: Sequence[SourceConfig]) -> list[int]:
    """Count the items of each source that are neither held out nor duplicates, also of those of `known`."""
    held, drops = config.data.held_out, config.data.deduplicate
    if held is None and not drops:
        return [sum(1 for _ in read_items(source)) for source in sources]
    bound = held_out_below(held.fraction) if held is not None else 0
    seen = {number for source in known for number in _hashes(source)}
    sizes = []
    for source in sources:
        ours = [number for number in _hashes(source) if number >= bound]
        sizes.append(len(set(ours) - seen) if drops else len(ours))
        seen.update(ours)
    return sizes


def _hashes(source: SourceConfig) -> Iterator[int]:
    for number, item in enumerate(read_items(source)):
        check_item(source, item, number)
        yield prompt_hash(source, item)


def read_measured_steps(config: Config) -> MeasuredSteps | None:
    """Return what the run directory says of the steps already taken; None before the first."""
    run = RunDir(config.run_path)
    state = read_state(run)
    is_known = config.train.total_epochs is None
    total_steps = train_length(config, 1).total_steps if is_known else state.total_steps if state else None
    nodes = {record.attempt: len(record.nodes) for record in read_attempts(run)}
    return measured_steps(read_metrics(run.metrics), nodes, total_steps)


def measured_steps(
    metrics: Mapping[int, Mapping[str, Any]], nodes_by_attempt: Mapping[int, int], total_steps: int | None
) -> MeasuredSteps | None:
    """Return the newest attempt's steps in `metrics` (by step); None when none was measured."""
    timed = {step: line for step, line in metrics.items() if step > 0 and math.isfinite(line.get(_STEP_TIME, math.nan))}
    if not timed:
        return None
    last_step = max(timed)
    attempt = int(timed[last_step].get("attempt", 1))
    seconds = [line[_STEP_TIME] for line in timed.values() if line.get("attempt", 1) == attempt]
    remaining = None if total_steps is None else max(0, total_steps - last_step)
    return MeasuredSteps(statistics.median(seconds), len(seconds), attempt, nodes_by_attempt.get(attempt), remaining)
