"""A checkpoint engine for DeepSpeed: stages a learner's files in host memory, writes them and reads them.

`StagedFiles` handles every file of a checkpoint in DeepSpeed's place. It writes a file at once, or keeps a copy in
memory, and `write` writes the copies during training. DeepSpeed's own decoupled engine does not help: its next
optimizer step waits for the writer. Files are read as tensors and plain data only: a planted pickle does not run.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hpc_grpo.run.checkpoint import FileEntry, hash_files
from hpc_grpo.run.files import fsync
from hpc_grpo.system.memory import freed_bytes, host_memory

_KEPT_FREE = 0.1
"""Share of the memory of the node, or of the job on the node, that copies must leave free.

Below 0.05, Ray kills a process of the node, usually an engine.
"""


class RunDisk:
    """The run's disk, for a process that sees it. Other processes use `HeadDisk`.

    DeepSpeed only knows local folders, so it gets the paths that `here` returns. All other methods may raise OSError.
    """

    def here(self, path: Path) -> Path:
        """Return the local path for reading and writing the run's `path`."""
        return path

    def save(self, state: Any, here: Path) -> None:
        """Write a state like torch.save. Only after `settle` is the file surely on the disk."""
        torch.save(state, here)  # by path: torch then writes without Python's lock

    def settle(self, folder: Path, files: Sequence[Path]) -> list[FileEntry]:
        """Sync `files` of `folder` to the disk; return their entries. All paths are local, as `here` returns them."""
        for file in files:
            fsync(file)
        return hash_files(folder, [str(file.relative_to(folder)) for file in files])

    @contextmanager
    def opened(self, folder: Path, *, whole: bool = False) -> Iterator[Path]:
        """Yield the path of a checkpoint. Its files may be read after `fetch`, or at once if `whole`."""
        yield folder

    def fetch(self, here: Path) -> None:
        """Make the content of a file of an opened checkpoint available at the local path `here`."""

    @contextmanager
    def new_file(self, path: Path) -> Iterator[BinaryIO]:
        """Yield a file to write in the block. It appears at the run's `path` when it is complete and on the disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.tmp")
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


class StagedFiles:
    """The checkpoint files of one learner, on the `disk` of its run. Has the methods of DeepSpeed's checkpoint engine.

    `keeps`: copies of saved files stay in memory until `write`. If the node lacks the memory for a copy, the file is
    written at once: training waits, but does not run out of memory.
    """

    def __init__(self, learners_on_node: int = 1) -> None:
        self.disk = RunDisk()
        self.keeps = False
        self.written: list[Path] = []
        self._learners_on_node = learners_on_node
        self._staged: list[tuple[Any, Path]] = []
        self._memory = HostMemory()

    @contextmanager
    def new_checkpoint(self, *, keeps: bool) -> Iterator[None]:
        """Collect the files saved in the block as one checkpoint. The previous checkpoint must already be on disk."""
        self.keeps, self.written, self._staged = keeps, [], []
        with self._memory.reused():
            yield

    def save(self, state_dict: Any, path: str | Path) -> None:
        if self.keeps and self._memory.has_room_for(state_dict, self._learners_on_node):
            self._staged.append((self._memory.copy(state_dict), Path(path)))
        else:
            self._write(state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        self.disk.fetch(Path(path))
        with torch.serialization.safe_globals(deepspeed_globals()):
            return torch.load(path, map_location=map_location, weights_only=True)

    def write(self) -> list[Path]:
        """Write the kept copies, from any thread. Return the checkpoint's files, which `disk` must still settle."""
        while self._staged:
            self._write(*self._staged.pop(0))
        return self.written

    def _write(self, state: Any, path: Path) -> None:
        self.disk.save(state, path)
        self.written.append(path)

    def create(self, _info: Any) -> None: ...

    def commit(self, _info: Any) -> bool:
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        """Return whether DeepSpeed must copy views out of their storages. Copies in memory do this anyway."""
        return not self.keeps


class HostMemory:
    """Host copies of a checkpoint's tensors. The next checkpoint reuses the memory, because new pages are slow."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._num_used = 0
        self._needed_again = 0
        """Bytes that this learner has freed since its peak: on CPU, gradients and activations of a step."""

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Reuse the memory of the previous block's copies. At the end of the block all copies are complete."""
        self._num_used = 0
        self._needed_again = 0 if torch.cuda.is_available() else freed_bytes()
        yield
        del self._held[self._num_used :]
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def has_room_for(self, state: Any, learners_on_node: int) -> bool:
        """Return whether enough memory stays free if each of the node's learners makes such a copy and trains on."""
        reused = sum(_allocated(held.nbytes, pinned=held.is_pinned()) for held in self._held[self._num_used :])
        new, memory = _num_bytes(state) - reused, host_memory()
        room = (memory.available - _KEPT_FREE * memory.total) / learners_on_node - self._needed_again
        return new <= 0 or new < room

    def copy(self, state: Any) -> Any:
        """Return a copy of a state. A tensor under two names is copied once."""
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if value.numel() == 0 or key not in copies:
                copies[key] = self._next(value)
                copies[key].copy_(value.detach(), non_blocking=True)
            return copies[key]

        return tree_map(copied, state, is_leaf=lambda own: isinstance(own, torch.Size))

    def _next(self, tensor: Tensor) -> Tensor:
        """Return memory for `tensor`: that of the tensor at this position in the last checkpoint, or new memory."""
        index, self._num_used = self._num_used, self._num_used + 1
        held = self._held[index] if index < len(self._held) else None
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._held[index : index + 1] = [fresh]
        return fresh


def _num_bytes(state: Any) -> int:
    """Return the host memory of copies of a state's tensors."""
    tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    return sum(_allocated(tensor.nbytes, pinned=tensor.is_cuda) for tensor in tensors)


def _allocated(num_bytes: int, *, pinned: bool) -> int:
    """Return the size of an allocation: torch rounds pinned memory up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if pinned and num_bytes else num_bytes


def deepspeed_globals() -> list[Any]:
    """Return the classes in DeepSpeed's optimizer states, besides tensors and plain data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, OffloadDeviceEnum, ZeroStageEnum, fragment_address]
