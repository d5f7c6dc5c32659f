"""What CUDA is told of the store, on a stand-in for its runtime: no test here has a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_grpo.errors import ConfigError
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


def test_every_buffer_is_registered_whole_as_long_as_the_store_lives(
    cudart: Cudart, layout: BucketLayout, tmp_path: Path
) -> None:
    store = open_store(tmp_path, StoreSpec(layout, 2, key=1, page_lock=True), create=True)
    assert cudart.registered == {buffer.data_ptr(): layout.num_bytes for buffer in store.buffers}
    del store
    assert cudart.registered == {}


def test_no_buffer_is_registered_where_the_config_forbids_it(
    cudart: Cudart, layout: BucketLayout, tmp_path: Path
) -> None:
    open_store(tmp_path, StoreSpec(layout, 2, key=1, page_lock=False), create=True)
    assert cudart.registered == {}


def test_a_store_that_cuda_does_not_lock_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, layout: BucketLayout, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(code=2))
    with pytest.raises(ConfigError, match=r"cudaHostRegister: error 2\)\. Set weights\.page_lock=false"):
        open_store(tmp_path, StoreSpec(layout, 1, key=1, page_lock=True), create=True)
