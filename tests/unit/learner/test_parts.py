from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpc_grpo.learner import critic, parts
from hpc_grpo.learner.critic import Critic
from hpc_grpo.learner.packing import PackedBatch, pack
from hpc_grpo.learner.parts import Reference
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.metrics.reductions import Mean
from hpc_grpo.types import Minibatch
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence, with_experts


@pytest.mark.parametrize("keeps", [True, False])
def test_each_learner_writes_its_share_of_a_whole_reference_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Not the storage that its share is a view of."""
    values = torch.arange(40_000.0)
    weight = torch.nn.Parameter(values.reshape(200, 200), requires_grad=False)
    model = SimpleNamespace(hf_named_parameters=lambda: [("weight", weight)])
    monkeypatch.setattr(parts, "build_frozen", lambda *_: model)
    reference = Reference(minimal_config(loss={"kl": {"coef": 0.1, "refresh_steps": 1}}), 4, torch.device("cpu"))
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    files = StagedFiles()
    with files.new_checkpoint(keeps=keeps):
        reference.save(tmp_path, files)
    (file,) = files.write()
    assert torch.equal(files.load(str(file))["weight"], values[20_000:30_000])
    assert file.stat().st_size < 10_000 * 4 + 4_000


def test_a_reference_does_not_replay_the_experts_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "build_frozen", lambda *_: SimpleNamespace(hf_named_parameters=list))
    monkeypatch.setattr(parts, "score", lambda _, batch: batch.experts)
    reference = Reference(minimal_config(loss={"kl": {"coef": 0.1}}), 1, torch.device("cpu"))
    batch = pack(with_experts([ordinary_sequence(0, 0, [1, 2, 3], 2)]))
    assert batch.experts is not None
    assert reference.loss_inputs(batch) == {"ref_logprobs": None}


def test_a_critic_does_not_replay_the_experts_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[PackedBatch] = []

    class Valued(Critic):
        def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
            return [torch.zeros(2)]

        def train(self, batches: Sequence[PackedBatch], *_: object) -> dict[str, Mean]:
            trained.extend(batches)
            return {}

    monkeypatch.setattr(critic, "build_value_engine", lambda *_: SimpleNamespace())
    monkeypatch.setattr(critic, "pack_equalised", lambda groups, *_: [([pack(own)], own) for own in groups])
    monkeypatch.setattr(Critic, "_normalized", lambda _, advantages: advantages)
    sequences = tuple(with_experts([ordinary_sequence(0, 0, [1, 2, 3], 2)]))
    part = Valued(minimal_config(task="ppo"), 1, torch.device("cpu"))
    [minibatch], _ = part.before_step([Minibatch(sequences, 2, 1)])
    assert [batch.experts for batch in trained] == [None]
    assert minibatch.sequences[0].experts is not None
