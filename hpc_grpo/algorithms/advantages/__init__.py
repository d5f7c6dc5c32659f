"""The advantages that `loss.advantage` chooses from, one file each.

An advantage is `f(rewards, valid, normalize_std) -> advantages`, each `[G]`: the rollouts of one whole prompt, before
any filter. `valid` is False where the reward could not be computed; such a rollout is not trained on.
"""

from collections.abc import Callable, Sequence

AdvantageFunction = Callable[[Sequence[float], Sequence[bool], bool], Sequence[float]]
