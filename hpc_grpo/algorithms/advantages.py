"""The choices of `loss.advantage`: a settings class each, with the defaults of its paper.

Each is a pure function of floats. The driver calls it on complete groups. `rewards` and `valid` are `[G]`, one for each
rollout of a prompt. `valid` is False for a rollout whose reward failed, or that the run masks. Such a rollout has the
advantage 0.0. Means leave it out, and it is not trained on. If all valid rewards of a group are equal, the group's
advantages are 0.0. `reinforce_pp` differs: it compares each reward with the mean of the step. So does `turns`, by
the rewards of turns. An advantage is one number for all turns of a rollout, or a tuple with one for each turn.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from hpc_grpo import types
from hpc_grpo.errors import ConfigError, described
from hpc_grpo.registry import ADVANTAGES
from hpc_grpo.section import ByName, Fraction, PathText, Section

_STD_EPS = 1e-4
"""Added to the standard deviation, as in TRL: advantages of almost equal rewards must not explode."""

Rewards = Sequence[float]
Valid = Sequence[bool]
Groups = Sequence[Rewards]
Flags = Sequence[Valid]
NormalizeStd = Annotated[bool, Field(description="Divide by the standard deviation of the step.")]


class AdvantageSettings(Section):
    name: str
    compares_groups: ClassVar[bool] = False
    """Whether `of_step` computes the advantages, from all groups of a step. If not, `of_group` computes them."""

    def check(self) -> None:
        """Raise ConfigError if the user's function does not exist or does not take its args."""

    def of_step(self, rewards: Groups, valid: Flags) -> Groups:
        """Compute the advantages of all groups that a step trains on, each `[G]`."""
        return [self.of_rewards(own, flags) for own, flags in zip(rewards, valid, strict=True)]

    def of_group(self, rewards: Rewards, valid: Valid, turn_rewards: Groups = ()) -> Sequence[types.Advantage]:
        """Compute the advantages `[G]` of the rollouts of one prompt.

        `turn_rewards` holds the environment's reward of each turn of each rollout; () without an environment. Raises
        ValueError if the lengths differ or a valid reward is not finite.
        """
        return self.of_rewards(rewards, valid)

    def of_rewards(self, rewards: Rewards, valid: Valid) -> Sequence[float]:
        """Compute the advantages `[G]` from one reward for each rollout."""
        counted = over_valid(rewards, valid)
        # Compare rewards instead of subtracting: the mean's rounding error must not become a gradient.
        if not counted or max(counted) == min(counted):
            return (0.0,) * len(rewards)
        own = self.of_reward(counted)
        return tuple(own(reward) if ok else 0.0 for reward, ok in zip(rewards, valid, strict=True))

    def of_reward(self, counted: Sequence[float]) -> Callable[[float], float]:
        """Return a function from reward to advantage. `counted` are a group's valid rewards, not all equal."""
        raise NotImplementedError


class GroupArgs(Section):
    unbiased_std: bool = Field(True, description="Divide by G - 1 in the standard deviation; false: by G.")
    eps: PositiveFloat = Field(_STD_EPS, description="Added to the standard deviation.")


class TurnsArgs(GroupArgs):
    discount: Fraction = Field(1.0, description="Discount factor of later rewards, per turn.")


class _Centred(AdvantageSettings):
    normalize_std: bool = Field(True, description="Divide by the standard deviation of the group.")
    args: GroupArgs

    def of_reward(self, counted: Sequence[float]) -> Callable[[float], float]:
        """Return the function A_i = (r_i - mean(r)) / (std(r) + eps)   (DeepSeekMath, arXiv:2402.03300, section 4.1.2)

        or A_i = r_i - mean(r)                           (Dr. GRPO, arXiv:2503.20783), with `normalize_std` off

        By default, std is the sample standard deviation (divided by G - 1), as in TRL and verl; the paper does not say.
        open-instruct divides by G (`unbiased_std` off).

        >>> GroupAdvantage(normalize_std=False).of_group((1.0, 0.0, 0.0, 1.0), (True,) * 4)
        (0.5, -0.5, -0.5, 0.5)
        >>> GroupAdvantage(normalize_std=False).of_group((2.0, 0.0, 99.0), (True, True, False))
        (1.0, -1.0, 0.0)
        """
        import numpy as np

        mean, std = float(np.mean(counted)), float(np.std(counted, ddof=int(self.args.unbiased_std)))
        scale = std + self.args.eps if self.normalize_std else 1.0
        return lambda reward: (reward - mean) / scale


class GroupAdvantage(_Centred):
    name: Literal["group"] = "group"
    args: GroupArgs = GroupArgs()


class TurnsAdvantage(_Centred):
    name: Literal["turns"] = "turns"
    args: TurnsArgs = TurnsArgs()

    def of_group(self, rewards: Rewards, valid: Valid, turn_rewards: Groups = ()) -> Sequence[types.Advantage]:
        """Compute A_ik = (R_ik - mean_k) / (std_k + eps),   R_ik = sum over j >= k of discount^(j-k) * r_ij

        for turn k of rollout i. mean_k and std_k are over the group's valid rollouts that have a turn k. If only one
        rollout has a turn k, this turn's advantage is 0.0. `rewards_by_turn` defines r. Without an environment the
        result is that of `group`.

        The returns are those of GiGPO's step advantages (arXiv:2505.10978, section 4.2). GiGPO compares turns that met
        the same state and adds the advantage of the episode; here turns of the same number are compared, and nothing
        is added. verl, SkyRL and TRL give all turns the advantage of the episode's reward, as `group` does.
        REINFORCE++ in verl discounts by token, and compares the tokens of the whole batch.

        >>> advantage = TurnsAdvantage(args=TurnsArgs(discount=0.5), normalize_std=False)
        >>> advantage.of_group((2.0, 1.0), (True, True), ((0.0, 2.0), (1.0,)))
        [(0.0, 0.0), (0.0,)]
        >>> advantage.of_group((2.0, 1.0), (True, True), ((1.0, 1.0), (1.0, 0.0)))
        [(0.25, 0.5), (-0.25, -0.5)]
        """
        if not turn_rewards:
            return self.of_rewards(rewards, valid)
        returns = [_discounted(own, self.args.discount) for own in rewards_by_turn(rewards, turn_rewards)]
        of_turns = []
        for turn in range(max(map(len, returns))):
            has_turn = [ok and turn < len(own) for own, ok in zip(returns, valid, strict=True)]
            of_turns.append(self.of_rewards([own[turn] if turn < len(own) else 0.0 for own in returns], has_turn))
        return [tuple(own[at] for own in of_turns[: len(returns[at])]) for at in range(len(returns))]


class GroupStepStdAdvantage(AdvantageSettings):
    name: Literal["group_step_std"] = "group_step_std"
    compares_groups: ClassVar[bool] = True

    def of_step(self, rewards: Groups, valid: Flags) -> Groups:
        """Compute A_i = (r_i - mean over its group) / (std(r) + 1e-4), std of the raw rewards of the whole step

        (Lite PPO, arXiv:2508.08221, as TRL has it: `scale_rewards: batch`). std is divided by N - 1. In contrast,
        `reinforce_pp_baseline` uses the deviation of the centred rewards.

        >>> [round(a, 4) for a in GroupStepStdAdvantage().of_step([(1.0, 0.0), (0.0, 0.0)], [(True, True)] * 2)[0]]
        [0.9998, -0.9998]
        """
        import numpy as np

        centred = GroupAdvantage(normalize_std=False).of_step(rewards, valid)
        counted = [own for group, flags in zip(rewards, valid, strict=True) for own in over_valid(group, flags)]
        scale = float(np.std(counted, ddof=1)) + _STD_EPS if len(counted) > 1 else 1.0
        return [tuple(own / scale for own in group) for group in centred]


class RlooAdvantage(AdvantageSettings):
    name: Literal["rloo"] = "rloo"

    def of_reward(self, counted: Sequence[float]) -> Callable[[float], float]:
        """Return the function A_i = r_i - mean of r_j over j != i   (REINFORCE leave-one-out, arXiv:2402.14740, eq. 7)

        Equals G / (G - 1) times the distance to the group's mean. The baseline leaves out rollout i, so it does not
        bias the gradient. The baseline of `group` biases it.

        >>> RlooAdvantage().of_group((9.0, 12.0, 1.0), (True, True, False))
        (-3.0, 3.0, 0.0)
        """
        total, others = sum(counted), len(counted) - 1
        return lambda reward: reward - (total - reward) / others


class MaxRlAdvantage(AdvantageSettings):
    name: Literal["maxrl"] = "maxrl"

    def of_reward(self, counted: Sequence[float]) -> Callable[[float], float]:
        """Return the function A_i = (r_i - mean(r)) / mean(r)        (Maximum Likelihood RL, arXiv:2602.02710)

        For rewards of 0 and 1, this estimates the gradient of the log pass rate from G samples. If the mean is not
        positive, no rollout solved the prompt: all advantages are 0.0.

        >>> MaxRlAdvantage().of_group((9.0, 3.0, 99.0), (True, True, False))
        (0.5, -0.5, 0.0)
        """
        mean = sum(counted) / len(counted)
        return lambda reward: (reward - mean) / mean if mean > 0.0 else 0.0


class PassKArgs(Section):
    k: PositiveInt = Field(4, description="The k of pass@k, at most rollout.group_size.")


class PassKAdvantage(AdvantageSettings):
    name: Literal["pass_k"] = "pass_k"
    args: PassKArgs = PassKArgs()

    def of_reward(self, counted: Sequence[float]) -> Callable[[float], float]:
        """Return the function from reward to advantage for the reward of k rollouts together. F of N rollouts failed.

        R = 1 - C(F, k) / C(N, k),   s = sqrt(R * (1 - R))
        A of a passed rollout = (1 - R) / s
        A of a failed rollout = (1 - R - C(F - 1, k - 1) / C(N - 1, k - 1)) / s

        A subset of k rollouts passes if one of its rollouts passes; a rollout passes if its reward is above 0. A
        rollout's advantage is its mean GRPO advantage over all subsets that contain it (Pass@k Training,
        arXiv:2508.10751, section 2.4). If all subsets pass, or all fail, or N < k, all advantages are 0.0.

        >>> [round(a, 4) for a in PassKAdvantage(args=PassKArgs(k=2)).of_group((1.0, 0.0, 0.0), (True,) * 3)]
        [0.7071, -0.3536, -0.3536]
        """
        count, failed, k = len(counted), sum(reward <= 0.0 for reward in counted), self.args.k
        if not k <= failed < count:
            return lambda reward: 0.0
        missed = math.comb(failed, k) / math.comb(count, k)
        deviation = math.sqrt(missed * (1.0 - missed))
        others_missed = math.comb(failed - 1, k - 1) / math.comb(count - 1, k - 1)
        return lambda reward: (missed if reward > 0.0 else missed - others_missed) / deviation


class ReinforcePpAdvantage(AdvantageSettings):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    normalize_std: NormalizeStd = True
    compares_groups: ClassVar[bool] = True

    def of_step(self, rewards: Groups, valid: Flags) -> Groups:
        """Compute A_i = (r_i - mean(r)) / (std(r) + 1e-8)        (REINFORCE++, arXiv:2501.03262, eq. 6), std over N

        Mean and deviation are over the step's valid rollouts, not over tokens.

        >>> flags = [(True, True), (True, True)]
        >>> ReinforcePpAdvantage(normalize_std=False).of_step([(1.0, 0.0), (1.0, 2.0)], flags)
        [(0.0, -1.0), (0.0, 1.0)]
        """
        return _whitened(rewards, valid, self.normalize_std)


class ReinforcePpBaselineAdvantage(AdvantageSettings):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    normalize_std: NormalizeStd = True
    compares_groups: ClassVar[bool] = True

    def of_step(self, rewards: Groups, valid: Flags) -> Groups:
        """Compute A_i = (b_i - mean(b)) / (std(b) + 1e-8), b_i = r_i - mean over its group  (arXiv:2501.03262, eq. 7)

        The standard deviation divides by N and is over rollouts, not over tokens. mean(b) is 0. If all rewards of a
        group are equal, the group's advantages are exactly 0.0.
        """
        centred = GroupAdvantage(normalize_std=False).of_step(rewards, valid)
        return _whitened(centred, valid, self.normalize_std, mean=0.0)


class OwnAdvantage(AdvantageSettings):
    name: PathText = Field(description="Your function: advantage(rewards, valid, **args) returns [G] numbers.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    def check(self) -> None:
        self._with_args(())

    def of_group(self, rewards: Rewards, valid: Valid, turn_rewards: Groups = ()) -> Sequence[types.Advantage]:
        """Call the user's function. If it has a parameter `turn_rewards`, pass the result of `rewards_by_turn`.

        Raises ConfigError if the function raises an exception, or returns anything but numbers.
        """
        function = self._with_args(rewards_by_turn(rewards, turn_rewards))
        try:
            return tuple(map(as_advantage, function(rewards, valid)))
        except (Exception, SystemExit) as error:  # A user's function may raise anything.
            raise ConfigError(f"loss.advantage.name = {self.name} failed: {described(error)}") from error

    def _with_args(self, turn_rewards: Groups) -> Callable[..., Any]:
        takes_turns = "turn_rewards" in inspect.signature(ADVANTAGES.find(self.name)).parameters
        more = {"turn_rewards": turn_rewards} if takes_turns else {}
        return ADVANTAGES.with_args(self.name, self.args | more, 2)


Advantage = Annotated[
    GroupAdvantage
    | TurnsAdvantage
    | GroupStepStdAdvantage
    | RlooAdvantage
    | MaxRlAdvantage
    | PassKAdvantage
    | ReinforcePpAdvantage
    | ReinforcePpBaselineAdvantage
    | OwnAdvantage,
    ByName("group"),
    Field(description="Computes advantages from rewards."),
]


def rewards_by_turn(rewards: Rewards, turn_rewards: Groups) -> list[tuple[float, ...]]:
    """Return the reward of each turn of each rollout. The turns' rewards add up to the rollout's reward.

    The last turn also gets the rewards of section `rewards`, which are not the environment's.

    >>> rewards_by_turn((1.5, 0.0), ((0.25, 0.5), (0.0,))), rewards_by_turn((1.5, 0.0), ())
    ([(0.25, 1.25), (0.0,)], [(1.5,), (0.0,)])
    """
    own_turns = turn_rewards or [(reward,) for reward in rewards]
    return [
        (*own[:-1], own[-1] + (reward - sum(own))) if len(own) > 1 else (reward,) * len(own)
        for reward, own in zip(rewards, own_turns, strict=True)
    ]


def as_advantage(given: Any) -> types.Advantage:
    """Convert a number, or one number for each turn, to floats."""
    try:
        return float(given)
    except TypeError:
        return tuple(map(float, given))


def has_signal(advantages: Sequence[types.Advantage]) -> bool:
    """Return whether one of the advantages is not 0."""
    return any(any(own) if isinstance(own, tuple) else own for own in advantages)


def of_each_turn(advantage: types.Advantage, num_turns: int) -> tuple[float, ...]:
    return advantage if isinstance(advantage, tuple) else (advantage,) * num_turns


def _discounted(rewards: Rewards, discount: float) -> tuple[float, ...]:
    """Return the discounted return of each turn: its reward plus the discounted rewards of later turns."""
    return tuple(accumulate(reversed(rewards), lambda later, own: own + discount * later))[::-1]


def over_valid(rewards: Rewards, valid: Valid) -> list[float]:
    """Return the valid rewards. Raises ValueError if the lengths differ or a valid reward is not finite."""
    if len(rewards) != len(valid):
        raise ValueError(f"{len(rewards)} rewards but {len(valid)} validity flags")
    counted = [float(reward) for reward, ok in zip(rewards, valid, strict=True) if ok]
    if not all(map(math.isfinite, counted)):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    return counted


def _whitened(values: Groups, valid: Flags, normalize_std: bool, mean: float | None = None) -> Groups:
    """Shift the valid values of all groups together to mean 0. With `normalize_std`, scale them to deviation 1.

    Invalid values get 0.0. Pass `mean` if it is known exactly: a value equal to `mean` then becomes exactly 0.0.
    """
    counted = [value for group, flags in zip(values, valid, strict=True) for value in over_valid(group, flags)]
    if not counted or max(counted) == min(counted):
        return [(0.0,) * len(group) for group in values]
    centre = math.fsum(counted) / len(counted) if mean is None else mean
    deviation = math.sqrt(math.fsum((value - centre) ** 2 for value in counted) / len(counted))
    scale = deviation + 1e-8 if normalize_std else 1.0

    def own(value: float, ok: bool) -> float:
        return (value - centre) / scale if ok else 0.0

    return [tuple(map(own, group, flags)) for group, flags in zip(values, valid, strict=True)]


def overlong_penalty(num_tokens: int, longest: int, buffer: int) -> float:
    """Return the penalty that a completion of `num_tokens` tokens adds to its reward: 0.0 down to -1.0 at `longest`.

    0                                              n <= longest - buffer
    ((longest - buffer) - n) / buffer              else                    (DAPO, arXiv:2503.14476, eq. 13)

    >>> [overlong_penalty(n, longest=20, buffer=4) for n in (16, 17, 20)]
    [0.0, -0.25, -1.0]
    """
    return min(0.0, (longest - buffer - num_tokens) / buffer)
