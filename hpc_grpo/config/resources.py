"""What learners and engines take of a node: the arithmetic that the job reserves by, and `submit` judges by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError

Bundle = dict[str, float]


def node_bundles(config: Config, *, with_gpus: bool) -> tuple[tuple[Bundle, ...], tuple[Bundle, ...]]:
    """The bundles of one node's learners and engines; SFT has no engines."""
    placement, engine = config.placement, config.engine
    learner: Bundle = {"CPU": placement.cpus_per_learner}
    sampler: Bundle = {"CPU": placement.cpus_per_engine}
    if with_gpus:
        learner["GPU"] = 1
        sampler["GPU"] = engine.tensor_parallel
    num_engines = engine.engines_per_node if config.task == "grpo" else 0
    return (learner,) * placement.learners_per_node, (sampler,) * num_engines


def check_fits(config: Config, place: str, resources: Mapping[str, float], bundles: Sequence[Bundle]) -> None:
    """Raise ConfigError with the sum when the bundles need more than `place`, a node, has."""
    for kind in ("GPU", "CPU"):
        needed = sum(bundle.get(kind, 0) for bundle in bundles)
        available = resources.get(kind, 0)
        if needed > available:
            raise ConfigError(
                f"{place} has {available:g} {kind}s, but placement.learners_per_node = "
                f"{config.placement.learners_per_node} and engine.engines_per_node = "
                f"{config.engine.engines_per_node} (engine.tensor_parallel = {config.engine.tensor_parallel}) "
                f"need {needed:g}. Ask for fewer engines, or for larger nodes"
                + (", or lower placement.cpus_per_engine." if kind == "CPU" else ".")
            )
