"""A GPU's side of the store: memory registered for DMA, and copies on a stream beside what the GPU computes.

Without registration a copy passes through a buffer of CUDA's, at a fraction of the bandwidth, and holds up its caller.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from hpc_grpo.weights.store import BucketLayout, StoredVersion, StoreSpec, WeightStore, views

_KEPT_FREE_BYTES = 2**30
"""What a copy leaves of a GPU's memory: that of kernels which allocate for themselves."""


def open_store(folder: Path, spec: StoreSpec, *, create: bool) -> WeightStore:
    """Open or create the node's store, and page-lock it for this process's GPU, if it has one, while it lives."""
    store = WeightStore(folder, spec, create=create)
    if not torch.cuda.is_available():
        return store
    cudart, address, size = torch.cuda.cudart(), store.raw.data_ptr(), store.raw.nbytes
    if code := int(cudart.cudaHostRegister(address, size, 0)):
        print(
            f"CUDA cannot page-lock the weight store of {size / 2**30:.2f} GiB (cudaHostRegister: error {code}). "
            f"Publishes copy through pageable memory, which is slower.",
            flush=True,
        )
        # CUDA keeps the error for this thread, and the next kernel's launch would raise it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        return store
    store.is_page_locked = True
    # Before the mapping goes; at the process's end CUDA does it.
    weakref.finalize(store, cudart.cudaHostUnregister, address).atexit = False
    return store


class SideStream:
    """Copies of a learner's parameters to the store, on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (target, source), and return when all have arrived."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


class StagedOnGpu:
    """An engine's copy of a staged version in its GPU's memory, taken while it samples with the version before."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        self._stream = torch.cuda.Stream()
        self._bytes: torch.Tensor | None = None
        self._staged: StoredVersion | None = None

    def begin(self, store: WeightStore, stored: StoredVersion) -> None:
        """Have a version copied on the side, and return at once; do nothing where it does not fit beside the KV cache.

        The store must be registered: copies from pageable memory would hold up the sampling.
        """
        self._staged = None
        if self._bytes is None:
            free, _ = torch.cuda.mem_get_info()
            if free < self._layout.num_bytes + _KEPT_FREE_BYTES:
                return
            self._bytes = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device="cuda")
        # Loads of the version before read these bytes on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._bytes.copy_(store.raw[: len(self._bytes)], non_blocking=True)
        self._staged = stored

    def tensors(self, stored: StoredVersion) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Give the parameters of a version on the GPU, for the current stream; None where it has not been copied."""
        if self._bytes is None or self._staged != stored:
            return None
        torch.cuda.current_stream().wait_stream(self._stream)
        raw = self._bytes
        return (pair for bucket in self._layout.buckets for pair in views(raw, bucket))
