from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpc_grpo.learner import parts
from hpc_grpo.learner.packing import pack
from hpc_grpo.learner.parts import Reference
from hpc_grpo.learner.staging import StagedFiles
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
