"""Have the driver's own scheduler take steps at the rates that `expected` gives, on simulated clocks, before a run.

That tells what no sum of two times does: what it costs that some completions are longer than others, since a step waits
for its last one, and how much of that a lag hides. Lengths are assumed: nobody knows them before sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_grpo.algorithms.advantages import GroupAdvantage
from hpc_grpo.config import Config
from hpc_grpo.config.train import GrpoTask
from hpc_grpo.plan.expected import expected_rates
from hpc_grpo.plan.fit import Plan
from hpc_grpo.plan.placement import CLOSE, Split, changed_settings
from hpc_grpo.simulate.lengths import LOGNORMAL, Sequences, cut_lengths, scale_of
from hpc_grpo.simulate.rates import DrawnStep, Rates

if TYPE_CHECKING:
    from hpc_grpo.simulate.forecast import Forecast

MEAN_SHARE = 0.25
"""The mean of the lengths, a share of rollout.max_new_tokens; lognormal, and cut there. Assumed."""
EVEN = (1.0,)
"""Lengths that all are the mean."""
_ROLLOUTS, _MOST_STEPS = 8192, 100
"""A simulation counts so many rollouts: a tenth of a second or two."""
_MOST_ROLLOUTS = 2048
"""Of a step with more, some of the nodes are simulated, with their share of it."""


@dataclass(frozen=True)
class ScheduledStep:
    """A step at one lag: as simulated, and as it were if all completions were as long as the mean."""

    lag: int
    with_tail: Forecast
    even: Forecast


def mean_tokens(config: Config) -> int:
    return max(1, round(MEAN_SHARE * config.rollout.max_new_tokens))


def scheduled_steps(plan: Plan) -> Iterator[ScheduledStep]:
    """Simulate the plan in turn, a step ahead, and at its own lag. Imports Ray."""
    own = plan.config.rollout.max_policy_lag
    for lag in [0] if plan.config.placement.colocate else sorted({0, plan.config.train.num_minibatches, own}):
        with_tail, even = simulated(plan, lag, LOGNORMAL), simulated(plan, lag, EVEN)
        if with_tail and even:
            yield ScheduledStep(lag, with_tail, even)


def faster_with_tail(plan: Plan, splits: Sequence[Split], step_s: float) -> tuple[Split, Forecast] | None:
    """Return the split that changes least of the plan, among those simulated to be as good as the fastest.

    None where a step of `step_s` is as good, too. Imports Ray.
    """
    safe = [split for split in splits if not split.plan.warnings] or splits
    simulations = (
        (split, simulated(split.plan, split.plan.config.rollout.max_policy_lag, LOGNORMAL)) for split in safe
    )
    found = [(split, forecast) for split, forecast in simulations if forecast]
    enough_s = CLOSE * min((forecast.step_s for _, forecast in found), default=step_s)
    if step_s <= enough_s:
        return None
    equals = [each for each in found if each[1].step_s <= enough_s]
    return min(equals, key=lambda each: (len(changed_settings(plan, each[0])), each[1].step_s))


def simulated(plan: Plan, lag: int, shares: tuple[float, ...]) -> Forecast | None:
    """Simulate the plan with completions' lengths in these shares of their mean; None where no time is expected."""
    from hpc_grpo.simulate.cluster import Setting
    from hpc_grpo.simulate.forecast import forecast_amid

    config, longest = plan.config, plan.config.rollout.max_new_tokens
    scale = scale_of(shares, mean_tokens(config), longest)
    lengths = cut_lengths(shares, scale, longest)
    # A token is likelier one of a long completion than of a short one.
    expected = expected_rates(plan, sum(length**2 for length in lengths) / sum(lengths))
    if expected is None:
        return None
    per_node = config.rollout.prompts_per_step * config.rollout.group_size / plan.num_nodes
    nodes = min(plan.num_nodes, max(1, int(_MOST_ROLLOUTS / per_node)))
    # Steps that begin together end together: with a lag they come in bursts, of which whole ones are counted.
    ahead = lag // config.train.num_minibatches
    num_bursts = max(1, round(min(_MOST_STEPS, _ROLLOUTS / (per_node * nodes)) / (ahead + 1)))
    return forecast_amid(
        _simulated_config(config, nodes / plan.num_nodes),
        Sequences(shares, config.data.max_prompt_tokens, leaves_out=False),
        Rates(expected.decoding, expected.training, (DrawnStep(scale, 1.0, 1.0, 0.0, 0.0, alike_share=0.0),)),
        Setting(nodes, config.placement.learners_per_node, config.engine.engines_per_node, lag),
        num_steps=num_bursts * (ahead + 1),
        edge=ahead,
    )


def _simulated_config(config: Config, share: float) -> Config:
    """Return the config with a share of the prompts. No algorithm or advantage of a user's is run."""
    prompts = max(1, round(share * config.rollout.prompts_per_step))
    rollout = config.rollout.model_copy(update={"prompts_per_step": prompts})
    loss = config.loss.model_copy(update={"advantage": GroupAdvantage()})
    return config.model_copy(update={"task": GrpoTask(), "rollout": rollout, "loss": loss})
