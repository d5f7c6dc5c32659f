"""A GPU's side of the store: memory registered for DMA, and copies on a stream beside the GPU's other work.

Without registration a copy passes through a CUDA buffer at a fraction of the bandwidth, and blocks its caller.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from hpc_grpo.weights.store import BucketLayout, StoredVersion, StoreSpec, WeightStore, views

_KEPT_FREE_BYTES = 2**30
"""GPU memory that a copy must leave free, for kernels that allocate for themselves, beside an engine's own needs."""


def open_store(folder: Path, spec: StoreSpec, *, create: bool) -> WeightStore:
    """Open or create the node's store. If this process has a GPU, page-lock the store for it until the store closes."""
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
        # CUDA raises the error again at this thread's next kernel launch. Launch a kernel here to clear it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        return store
    store.is_page_locked = True
    # Unregister before the mapping is removed. At the end of the process CUDA does this.
    weakref.finalize(store, cudart.cudaHostUnregister, address).atexit = False
    return store


def copy_on(stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each (target, source) beside the GPU's other work, and return when all have arrived."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    stream.synchronize()


class StagedOnGpu:
    """An engine's copy of a staged version in GPU memory, made while it samples with the previous version.

    The copy leaves free what the engine's largest batch takes, and what a load takes: the largest bucket once more.
    """

    def __init__(self, layout: BucketLayout, largest_batch_bytes: int) -> None:
        self._layout = layout
        largest = max((bucket.end - bucket.start for bucket in layout.buckets), default=0)
        self._kept_free = _KEPT_FREE_BYTES + max(largest, largest_batch_bytes)
        self._stream = torch.cuda.Stream()
        self._bytes: torch.Tensor | None = None
        self._staged: StoredVersion | None = None

    def begin(self, store: WeightStore, stored: StoredVersion) -> None:
        """Start to copy a version, and return at once. Do nothing if the GPU lacks the memory for it.

        The store must be registered: copies from pageable memory would delay the sampling.
        """
        self._staged = None
        if self._bytes is None:
            free, _ = torch.cuda.mem_get_info()
            if free < self._layout.num_bytes + self._kept_free:
                return
            self._bytes = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device="cuda")
        # Wait for the load of the previous version, which reads these bytes on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._bytes.copy_(store.raw[: len(self._bytes)], non_blocking=True)
        self._staged = stored

    def tensors(self, stored: StoredVersion) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Return a version's parameters on the GPU, for use on the current stream; None if it was not copied."""
        if self._bytes is None or self._staged != stored:
            return None
        torch.cuda.current_stream().wait_stream(self._stream)
        raw = self._bytes
        return (pair for bucket in self._layout.buckets for pair in views(raw, bucket))
