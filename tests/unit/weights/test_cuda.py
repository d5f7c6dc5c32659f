"""What CUDA is told of the store, on a stand-in for its runtime: no test here has a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_grpo.weights.cuda import open_store
from hpc_grpo.weights.store import BucketLayout, StoreSpec


class Cudart:
    """Stands for torch.cuda.cudart(): keeps the ranges registered, or refuses with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self._code = code

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        self.registered[address] = num_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_the_store_is_registered_whole_as_long_as_the_store_lives(
    cudart: Cudart, layout: BucketLayout, tmp_path: Path
) -> None:
    store = open_store(tmp_path, StoreSpec(layout, key=1), create=True)
    assert cudart.registered == {store.raw.data_ptr(): layout.num_bytes}
    assert store.is_page_locked
    del store
    assert cudart.registered == {}


def test_a_store_that_cuda_does_not_lock_is_copied_through_pageable_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layout: BucketLayout, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(code=2))
    assert not open_store(tmp_path, StoreSpec(layout, key=1), create=True).is_page_locked
    assert "cudaHostRegister: error 2" in capsys.readouterr().out
