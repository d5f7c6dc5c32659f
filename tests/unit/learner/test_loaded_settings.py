"""The optimizer's settings when a checkpoint is loaded: those of the config, which a fork may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from hpc_grpo.learner.checkpoint import settings_of_config


def trainer(lr: float, betas: tuple[float, float] = (0.9, 0.95)) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW of two parameter groups, with two steps of warm-up and ten of decay."""
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.ones(3, 2))], "weight_decay": 0.1},
        {"params": [torch.nn.Parameter(torch.ones(3))], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas)
    return optimizer, LambdaLR(optimizer, lambda step: min(step / 2, max(0.0, 1 - step / 10)))


def rates(optimizer: torch.optim.AdamW, scheduler: LambdaLR, num_steps: int) -> Iterator[tuple[float, ...]]:
    """Yield the learning rate of each group in each step."""
    for _ in range(num_steps):
        yield tuple(group["lr"] for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()


def engine_of(optimizer: torch.optim.AdamW, scheduler: LambdaLR | None, clip: float = 1.0) -> Any:
    """What a load reads of DeepSpeed's engine and its ZeRO optimizer."""
    groups = property(lambda _: optimizer.param_groups)  # loading replaces the list
    zero = type("Zero", (), {"param_groups": groups, "clip_grad": clip})()
    return SimpleNamespace(optimizer=zero, lr_scheduler=scheduler)


def loaded(saved: tuple[Any, Any], *made: Any) -> tuple[torch.optim.AdamW, LambdaLR]:
    optimizer, scheduler = trainer(*made)
    engine = engine_of(optimizer, scheduler, clip=0.5)
    with settings_of_config(engine):
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        engine.optimizer.clip_grad = 1.0  # as ZeRO-1 and ZeRO-2 do
    assert engine.optimizer.clip_grad == 0.5
    return optimizer, scheduler


def test_a_resume_has_the_same_bits_and_a_fork_the_settings_of_its_config() -> None:
    optimizer, scheduler = trainer(3e-4)
    list(rates(optimizer, scheduler, 4))
    saved = optimizer.state_dict(), scheduler.state_dict()
    straight = list(rates(optimizer, scheduler, 3))
    resumed = loaded(saved, 3e-4)
    assert list(rates(*resumed, 3)) == straight
    assert resumed[0].state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    forked = loaded(saved, 6e-4, (0.8, 0.9))
    assert forked[1].get_last_lr() == [2 * rate for rate in straight[0]]
    assert list(rates(*forked, 3)) == [tuple(2 * rate for rate in step) for step in straight]
    assert [(group["betas"], group["weight_decay"]) for group in forked[0].param_groups] == [
        ((0.8, 0.9), 0.1),
        ((0.8, 0.9), 0.0),
    ]
    moments = [state["exp_avg"] for state in forked[0].state.values()]
    assert all(moment.abs().sum() > 0 for moment in moments), "the optimizer's state goes on"


def test_an_optimizer_without_a_schedule_has_the_learning_rate_of_the_config() -> None:
    saved, (optimizer, _) = trainer(3e-4)[0].state_dict(), trainer(6e-4)
    for group in optimizer.param_groups:
        group["lr"] = 6e-4
    with settings_of_config(engine_of(optimizer, None)):
        optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [6e-4, 6e-4]
