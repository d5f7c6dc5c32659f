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
        self.pending = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        self.registered[address] = num_bytes
        self.pending = self._code
        return self._code

    def launch(self) -> None:
        """Raise the error that CUDA keeps, as a kernel's launch does."""
        code, self.pending = self.pending, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")

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
    """CUDA's error waits for the thread's next kernel, which is not to be one of the learner's."""
    cudart = Cudart(code=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: cudart.launch() if device == "cuda" else ones(*size))
    assert not open_store(tmp_path, StoreSpec(layout, key=1), create=True).is_page_locked
    assert "cudaHostRegister: error 2" in capsys.readouterr().out
    assert cudart.pending == 0
