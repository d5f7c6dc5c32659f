from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.config.rules import check_rules
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import Needs
from tests.support.configs import minimal_config
from tests.support.sequences import graded
from tests.unit.algorithms import references
from tests.unit.algorithms.test_objective import LONGEST, ragged_groups

TEACHER = {"task": {"name": "distill", "args": {"teacher": "org/large"}}}


@pytest.mark.parametrize("loss", [{}, {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1}, {"correction": "icepop"}])
def test_the_loss_is_that_of_the_teachers_advantages_added_to_those_of_rewards(loss: dict[str, Any]) -> None:
    """A_t + log teacher - log proximal, which the references of the losses then take, in float64."""
    config = minimal_config(task={"name": "distill", "args": {"teacher": "t", "reward_coef": 2.0}}, loss=loss)
    plain = ragged_groups(3)
    teachers = [own.reference for own in plain]  # another model's logprobs of the same tokens
    taught = [
        replace(own, advantages=own.advantages + theirs - own.proximal)
        for own, theirs in zip(plain, teachers, strict=True)
    ]

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(own, name) for own in plain]))

    live = column("learner").requires_grad_()
    ids = torch.from_numpy(np.repeat(np.arange(len(plain)), [len(own.learner) for own in plain]))
    inputs = LossInputs(live, column("proximal"), column("engine"), None, column("advantages"), ids)
    inputs = replace(inputs, teacher_logprobs=column("reference"))
    output = algorithm_of(config).objective().loss(inputs)
    expected = [references.token_losses(own.learner, own, config.loss)[0] for own in taught]
    np.testing.assert_allclose(output.per_token.detach(), np.concatenate(expected), atol=1e-9)
    shares = references.shares(taught, config.loss, LONGEST)
    weights = torch.from_numpy(np.repeat(shares, [len(own.learner) for own in taught]))
    (gradient,) = torch.autograd.grad(torch.dot(output.per_token, weights), live)
    by_differences = np.concatenate(references.gradients(taught, config.loss, LONGEST))
    np.testing.assert_allclose(gradient, by_differences, rtol=1e-5, atol=1e-8)
    gaps = np.concatenate([own.proximal - theirs for own, theirs in zip(plain, teachers, strict=True)])
    np.testing.assert_allclose(output.means["kl/learner_teacher"], gaps, atol=1e-12)


def test_its_gradient_is_that_of_the_reverse_kl_over_a_whole_vocabulary() -> None:
    """The expectation over the student's own samples of the gradient of its surrogate, for one token."""
    config = minimal_config(**TEACHER, loss={"correction": "none"})
    logits = torch.tensor([0.3, -0.2, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-1.0, 0.5, 0.1, 0.9], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    own = logprobs.detach()
    zeros = torch.zeros(4, dtype=torch.float64)
    inputs = LossInputs(logprobs, own, own, None, zeros, torch.arange(4), teacher_logprobs=teacher)
    per_token = algorithm_of(config).objective().loss(inputs).per_token
    (found,) = torch.autograd.grad(torch.dot(per_token, own.exp()), logits)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("coef", "expected"), [(0.0, (0.0, 0.0)), (0.5, (0.25, -0.25))])
def test_rewards_count_as_much_as_the_config_says(coef: float, expected: tuple[float, ...]) -> None:
    distill = {"name": "distill", "args": {"teacher": "org/large", "reward_coef": coef}}
    config = minimal_config(task=distill, loss={"advantage": {"normalize_std": False}})
    ((*found,),) = algorithm_of(config).step_advantages([graded(1.0, 0.0)])
    assert tuple(found) == expected
    assert config.needs == Needs(rollouts=True, teacher=True, rewards=coef > 0.0)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": "distill"}, "task.args.teacher is not set, and task distill needs it"),
        ({**TEACHER, "loss": {"advantage": "rloo"}}, "with task.args.reward_coef = 0 rewards give no advantages"),
        ({**TEACHER, "rollout": {"overlong_tokens": 9}}, "Set rollout.overlong_tokens=null, or task.args.reward_coef"),
        ({**TEACHER, "loss": {"name": "kl_cov"}}, "loss.name = kl_cov compares advantages before an optimizer step"),
        (
            {**TEACHER, "rollout": {"drop_zero_variance": True}},
            "drop_zero_variance: task = distill has no such",
        ),
        ({"rewards": []}, "rewards is empty"),
        (
            {"task": {"name": "distill", "args": {"teacher": "t", "reward_coef": 1.0}}, "rewards": []},
            "rewards is empty",
        ),
    ],
)
def test_a_distillation_that_contradicts_itself_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(minimal_config(**sections))
    assert words in str(caught.value)


def test_a_distillation_needs_no_reward() -> None:
    check_rules(minimal_config(**TEACHER, rewards=[]))
