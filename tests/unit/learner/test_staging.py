from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_grpo.learner.staging import HostMemory, StagedFiles, deepspeed_globals
from hpc_grpo.system.memory import Memory


def saved(files: StagedFiles, state: Any, path: Path) -> Any:
    with files.new_checkpoint(keeps=True):
        files.save(state, path)
    return files.load(str(path)) if files.write() else None


def test_what_is_written_is_what_was_staged(tmp_path: Path) -> None:
    weights, files = torch.arange(6.0), StagedFiles()
    nested = [{"step": torch.tensor(3)}, ("lr", 0.1), weights.shape]
    state = OrderedDict(flat=weights, view=weights[2:4], nested=nested)
    with files.new_checkpoint(keeps=True):
        files.save(state, tmp_path / "state.pt")
    assert not (tmp_path / "state.pt").exists()
    weights.zero_()
    state["nested"][0]["step"] += 1
    assert files.write() == [tmp_path / "state.pt"]
    found = files.load(str(tmp_path / "state.pt"))
    assert found["flat"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found["view"].tolist() == [2.0, 3.0]
    assert found["nested"][0]["step"].item() == 3
    assert found["nested"][1] == ("lr", 0.1)
    assert isinstance(found["nested"][2], torch.Size)


def test_a_tensor_under_two_names_is_kept_once() -> None:
    weights = torch.ones(4)
    copied = HostMemory().copy({"embedding": weights, "head": weights})
    assert copied["embedding"].data_ptr() == copied["head"].data_ptr() != weights.data_ptr()


def test_the_next_checkpoint_takes_the_same_memory() -> None:
    memory, addresses = HostMemory(), []
    for tensors in ([torch.ones(4), torch.ones(2)], [torch.zeros(4), torch.zeros(3)]):
        with memory.reused():
            copies = [memory.copy(tensor) for tensor in tensors]
        addresses.append(copies[0].data_ptr())
        assert [copy.tolist() for copy in copies] == [tensor.tolist() for tensor in tensors]
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize(("available", "needed_again"), [(1200, 0), (2200, 500)])
def test_what_the_node_has_no_room_for_is_written_at_once(
    available: int, needed_again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(total=4000, available=available)  # of which 400 are kept free
    monkeypatch.setattr("hpc_grpo.learner.staging.host_memory", lambda: memory)
    monkeypatch.setattr("hpc_grpo.learner.staging.freed_bytes", lambda: needed_again)
    files = StagedFiles(learners_on_node=2)
    with files.new_checkpoint(keeps=True):
        files.save({"small": torch.ones(50)}, tmp_path / "small.pt")
        files.save({"large": [torch.ones(150)]}, tmp_path / "large.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["large.pt"]
    assert [path.name for path in files.write()] == ["large.pt", "small.pt"]


@pytest.mark.parametrize(("available", "is_enough"), [(1500, True), (1400, False)])
def test_a_copy_out_of_a_gpu_takes_a_power_of_two(
    available: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's allocator of pinned memory does: 600 bytes take 1024."""
    monkeypatch.setattr("hpc_grpo.learner.staging.host_memory", lambda: Memory(total=4000, available=available))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert HostMemory().has_room_for({"weights": torch.ones(150)}, learners_on_node=1) == is_enough


def test_the_classes_of_deepspeeds_states_are_read(tmp_path: Path) -> None:
    *_, stage, address = deepspeed_globals()
    state = {"zero_stage": stage(2), "fragment": address(start=3, numel=4)}
    assert saved(StagedFiles(), state, tmp_path / "state.pt") == state


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_planted_pickle_does_not_run(tmp_path: Path) -> None:
    torch.save({"module": Planted(tmp_path / "owned")}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        StagedFiles().load(str(tmp_path / "state.pt"))
    assert not (tmp_path / "owned").exists()
