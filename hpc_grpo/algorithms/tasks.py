"""The choices of `task`: what each algorithm needs, its advantages, its training sequences and its loss.

Read `config.needs` to know which parts a run has, never the task's name. Importing this module loads neither numpy nor
torch, because a login node reads `needs` too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hpc_grpo.algorithms.advantages import has_signal, of_each_turn, overlong_penalty, rewards_by_turn
from hpc_grpo.algorithms.objective import Objective, Term, policy_objective
from hpc_grpo.algorithms.terms import LossInputs, LossOutput
from hpc_grpo.config import Config
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import Advantage, Completion, Demonstration, GroupGrades, GroupSamples, Needs, TrainSequence

Advantages = Sequence[Advantage]


class Algorithm(ABC):
    """The base class of tasks. A step trains on `items_per_step` prompts or demonstrations.

    Each prompt has `episodes_per_item` rollouts.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @property
    @abstractmethod
    def items_per_step(self) -> int: ...

    @property
    def episodes_per_item(self) -> int:
        return 1

    @abstractmethod
    def objective(self) -> Objective:
        """Return the objective of the learner's optimizer steps."""

    def advantages(self, grades: GroupGrades) -> Advantages:
        """Compute the advantages `[G]` of a group, in the driver: one number for each rollout, or one for each turn."""
        raise NotImplementedError(f"{type(self).__name__} trains on no groups")

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Advantages]:
        """Compute the advantages of all groups of a step. Override it for a method that compares groups."""
        return [self.advantages(grades) for grades in step]

    def teaches(self, grades: GroupGrades) -> bool:
        """Return whether one of the group's advantages is not 0, without regard to the step's other groups."""
        return has_signal(self.advantages(grades))

    def num_trained_tokens(self, grades: GroupGrades) -> int:
        """Count, in the driver, the tokens that `sequences` will train on.

        Override this method, `num_sequences` and `sequences` together.
        """
        return sum(n for n, valid in zip(grades.num_completion_tokens, grades.valid, strict=True) if valid)

    def num_sequences(self, grades: GroupGrades) -> int:
        """Count, in the driver, the sequences that `sequences` will return."""
        return sum(n for n, valid in zip(grades.num_sequences or grades.valid, grades.valid, strict=True) if valid)

    def sequences(self, samples: GroupSamples, advantages: Advantages, valid: Sequence[bool]) -> list[TrainSequence]:
        """Make the training sequences of a group's valid rollouts, in the learner: token arrays never pass the driver.

        Consecutive turns form one sequence. A turn that starts a new context begins a new sequence. Each sampled token
        has the advantage of its turn. The sequences of one rollout have `sample_index` i, i + G, i + 2G and so on.
        """
        made = []
        for index, (episode, advantage) in enumerate(zip(samples.episodes, advantages, strict=True)):
            if not valid[index]:
                continue
            parts: list[list[tuple[Completion, float]]] = []
            for turn, own in zip(episode.turns, of_each_turn(advantage, len(episode.turns)), strict=True):
                if turn.starts_anew:
                    parts.append([])
                parts[-1].append((turn, own))
            made += [
                _sequence(samples, index + len(samples.episodes) * number, part) for number, part in enumerate(parts)
            ]
        return made


def _sequence(samples: GroupSamples, sample_index: int, turns: Sequence[tuple[Completion, float]]) -> TrainSequence:
    """Concatenate consecutive turns, each with its advantage. Contexts are masked, completions are trained."""
    import numpy as np

    token_ids = np.concatenate([ids for turn, _ in turns for ids in (turn.context_ids, turn.token_ids)])
    loss_mask = np.zeros(len(token_ids), dtype=bool)
    advantages, engine_logprobs = np.zeros((2, len(token_ids)), dtype=np.float32)
    versions = np.zeros(len(token_ids), dtype=np.int32)
    end = 0
    for turn, advantage in turns:
        begin, start = end, end + len(turn.context_ids)
        end = start + len(turn.token_ids)
        loss_mask[start:end], advantages[begin:end] = True, advantage
        engine_logprobs[start:end] = turn.engine_logprobs
        versions[start:end] = turn.policy_versions
    of_tokens = loss_mask * advantages
    arrays = token_ids, loss_mask, of_tokens, engine_logprobs, versions
    experts = None
    if turns[-1][0].experts is not None:
        # The last token repeats the experts of the token before it.
        experts = np.concatenate([*(turn.experts for turn, _ in turns), turns[-1][0].experts[-1:]])
    return TrainSequence(samples.ordinal, sample_index, *arrays, samples.images, experts)


def algorithm_of(config: Config) -> Algorithm:
    """Create the algorithm named by `task`. Raises ConfigError if it does not exist."""
    algorithm: Algorithm = ALGORITHMS.find(config.task.name)(config)
    return algorithm


@ALGORITHMS.register("grpo")
class Grpo(Algorithm):
    """GRPO (DeepSeekMath, arXiv:2402.03300). `loss.advantage` and `loss.name` choose its two parts."""

    @property
    def needs(self) -> Needs:
        return Needs(rollouts=True, reference=self.config.loss.kl.coef > 0.0)

    @property
    def items_per_step(self) -> int:
        return self.config.rollout.prompts_per_step

    @property
    def episodes_per_item(self) -> int:
        return self.config.rollout.group_size

    def objective(self) -> Objective:
        return policy_objective(self.config.loss)

    def shaped_rewards(self, grades: GroupGrades) -> Sequence[float]:
        """Return the rewards `[G]` with the penalty of `rollout.overlong_tokens`. Environments have no penalty."""
        longest, buffer = self.config.rollout.max_new_tokens, self.config.rollout.overlong_tokens
        if buffer is None or grades.turn_rewards:
            return grades.rewards
        penalties = (overlong_penalty(n, longest, buffer) for n in grades.num_completion_tokens)
        return [reward + penalty for reward, penalty in zip(grades.rewards, penalties, strict=True)]

    def advantages(self, grades: GroupGrades) -> Advantages:
        return self.config.loss.advantage.of_group(self.shaped_rewards(grades), grades.valid, grades.turn_rewards)

    def teaches(self, grades: GroupGrades) -> bool:
        if not self.config.loss.advantage.compares_groups:
            return super().teaches(grades)
        pairs = zip(self.shaped_rewards(grades), grades.valid, strict=True)
        return len({reward for reward, valid in pairs if valid}) > 1

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Advantages]:
        if not self.config.loss.advantage.compares_groups:
            return super().step_advantages(step)
        rewards = [self.shaped_rewards(grades) for grades in step]
        return self.config.loss.advantage.of_step(rewards, [grades.valid for grades in step])


@ALGORITHMS.register("ppo")
class Ppo(Grpo):
    """PPO (arXiv:1707.06347) with generalised advantages (arXiv:1506.02438). `loss.name` is its policy loss.

    The driver sends each turn's reward in the field `advantages`. The critic, in the learner, takes this number at a
    turn's last token as the reward, and replaces the field by advantages.
    """

    @property
    def needs(self) -> Needs:
        return replace(super().needs, critic=True)

    def advantages(self, grades: GroupGrades) -> Advantages:
        rewards: Advantages = self.shaped_rewards(grades)
        if grades.turn_rewards:
            rewards = rewards_by_turn(grades.rewards, grades.turn_rewards)
        return [reward if valid else 0.0 for reward, valid in zip(rewards, grades.valid, strict=True)]

    def sequences(self, samples: GroupSamples, advantages: Advantages, valid: Sequence[bool]) -> list[TrainSequence]:
        """Make the sequences. The last token of a sequence also gets the rewards of the rollout's later sequences.

        `advantages` holds rewards. The critic sees one sequence at a time, so the state after a sequence has value 0.
        Later rewards are therefore added to the last token, without a discount.
        """
        carried: list[Advantage] = []
        for episode, rewards in zip(samples.episodes, advantages, strict=True):
            if isinstance(rewards, tuple):
                goes_on = [not turn.starts_anew for turn in episode.turns[1:]] + [True]
                rewards = tuple(
                    own if same else own + sum(rewards[at + 1 :])
                    for at, (own, same) in enumerate(zip(rewards, goes_on, strict=True))
                )
            carried.append(rewards)
        return super().sequences(samples, carried, valid)


@ALGORITHMS.register("distill")
class Distill(Grpo):
    """On-policy distillation: reverse KL to a teacher on the student's own completions (GKD, arXiv:2306.13649; MiniLLM,
    arXiv:2306.08543; Thinking Machines Lab 2025, "On-Policy Distillation"), by the policy gradient of `loss.name`.

    Rewards count only if `task.args.reward_coef` is set, through the advantages of `loss.advantage`.
    """

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher=True, rewards=self.config.task_args.reward_coef > 0.0)

    def objective(self) -> Objective:
        return policy_objective(self.config.loss, partial(taught_loss, self.config.loss.term))

    def step_advantages(self, step: Sequence[GroupGrades]) -> Sequence[Advantages]:
        coef = self.config.task_args.reward_coef
        if coef == 0.0:
            return [(0.0,) * len(grades.rewards) for grades in step]
        return [
            [tuple(coef * each for each in own) if isinstance(own, tuple) else coef * own for own in of_group]
            for of_group in super().step_advantages(step)
        ]


def taught_loss(term: Term, inputs: LossInputs) -> LossOutput:
    """Return the policy loss `term` with the advantage A_t + log teacher - log proximal, per token `[C]`.

    This is a one-sample estimate of the gradient of a token's reverse KL. The discount is 0, as at Thinking Machines: a
    token gets no credit for later tokens. MiniLLM sums over the rest of the sequence. The advantage has the proximal
    logprobs instead of the policy's, and no gradient. The correction's weights are proximal / engine.
    `kl/learner_teacher` estimates the KL by k1 at tokens that engines sampled. Raises ValueError without a teacher.
    """
    if inputs.teacher_logprobs is None:
        raise ValueError("distillation needs LossInputs.teacher_logprobs")
    gap = (inputs.proximal_logprobs - inputs.teacher_logprobs).detach()
    output = term(replace(inputs, advantages=inputs.advantages - gap))
    return replace(output, means=output.means | {"kl/learner_teacher": gap})


@ALGORITHMS.register("sft")
class Sft(Algorithm):
    """Trains on every token of the demonstrations' completions, with equal weights."""

    @property
    def needs(self) -> Needs:
        return Needs(labels=True)

    @property
    def items_per_step(self) -> int:
        return self.config.task_args.batch_size

    def objective(self) -> Objective:
        return Objective(negative_log_likelihood)


def negative_log_likelihood(inputs: LossInputs) -> LossOutput:
    """Return L = -A * learner_logprobs per token `[C]`, in nats; the advantage of a demonstration is 1."""
    per_token = -inputs.advantages * inputs.learner_logprobs
    return LossOutput(per_token, terms={"loss/policy": per_token.detach()})


def demonstration_sequence(demonstration: Demonstration) -> TrainSequence:
    """Make the training sequence of a demonstration, with advantage 1 and `engine_logprobs` 0."""
    import numpy as np

    token_ids = np.asarray(demonstration.prompt_token_ids + demonstration.completion_token_ids, dtype=np.int32)
    loss_mask = np.arange(len(token_ids)) >= len(demonstration.prompt_token_ids)
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return TrainSequence(demonstration.ordinal, 0, token_ids, loss_mask, loss_mask.astype(np.float32), zeros)
