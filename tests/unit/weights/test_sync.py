"""The driver's side, on actors that answer at once: what it asks of whom, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.remote import Deadline
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights import sync
from hpc_grpo.weights.sync import NodeMembers, WeightSync

CONFIG = Config.model_validate(
    {
        "run": {"name": "synced"},
        "model": {"path": "m"},
        "data": {"train": {"path": "d.jsonl"}},
        "train": {"total_steps": 1},
        "weights": {"deadline_s": 20.0},
        "deadlines": {"start_s": 900.0},
    }
)


class FakeActor:
    """Any method's `remote` gives what `answers` holds for it, called with the arguments where it is a function."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        answer = self._answers.get(method)
        return SimpleNamespace(remote=answer if callable(answer) else lambda *_, **__: answer)


def make_learner() -> FakeActor:
    return FakeActor(parameter_specs=[ParameterSpec("a", (4,), "float32")], open_weight_store=Path("/dev/shm/x"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[str, Deadline | None]:
    """What was waited for, and how long at most."""
    waits: dict[str, Deadline | None] = {}

    def get_all(values: Sequence[Any], deadline: Deadline | None, waiting_for: str) -> list[Any]:
        waits[waiting_for] = deadline
        return list(values)

    monkeypatch.setattr(sync, "get_all", get_all)
    return waits


def test_stores_have_the_time_of_the_start_and_a_publish_its_own(waits: dict[str, Deadline | None]) -> None:
    """A store of 140 GiB takes minutes to allocate, once; a publish that takes so long is stuck."""
    engine = SimpleNamespace(actor=FakeActor(contract_differences=[]))
    weights = WeightSync(CONFIG, [NodeMembers([make_learner()], [engine])])  # type: ignore[list-item]
    assert waits["the weight stores"] == Deadline(900.0, "deadlines.start_s")
    weights.publish(0)
    assert waits["the publish of weight version 0"] == Deadline(20.0, "weights.deadline_s")
