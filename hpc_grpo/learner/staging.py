"""DeepSpeed's checkpoint engine of a learner: keeps its files in host memory, writes them and reads them.

`StagedFiles` takes DeepSpeed's place for every file of a checkpoint. It writes a file where DeepSpeed asks for it, or
keeps a copy, for `write` to put on disk while training goes on. DeepSpeed's own decoupled engine is no help: its next
optimizer step waits for the writer. Files are read as tensors and plain data alone: a planted pickle does not run.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hpc_grpo.run.checkpoint import FileEntry, hash_files
from hpc_grpo.run.files import fsync
from hpc_grpo.system.memory import host_memory

_KEPT_FREE = 0.05
"""Share of the memory of the node, or of the job on it, that copies leave to everybody else."""


class RunDisk:
    """The disk that holds the run, where this process sees it; `HeadDisk` stands for it on other nodes.

    DeepSpeed, which knows folders alone, gets paths from `here`. All other methods raise OSError as a disk does.
    """

    def here(self, path: Path) -> Path:
        """Return the path by which this process writes and reads what is at `path` of the run."""
        return path

    def save(self, state: Any, here: Path) -> None:
        """Write a state as torch.save does; it may not be on the disk before `settle`."""
        torch.save(state, here)  # by its path: torch then writes without Python's lock

    def settle(self, folder: Path, files: Sequence[Path]) -> list[FileEntry]:
        """Sync files in `folder`, both paths of `here`, to the disk; return them by their names in it."""
        for file in files:
            fsync(file)
        return hash_files(folder, [str(file.relative_to(folder)) for file in files])

    @contextmanager
    def opened(self, folder: Path, *, whole: bool = False) -> Iterator[Path]:
        """Give the path of a checkpoint while the block runs. A file of it may be read after `fetch`, or if `whole`."""
        yield folder

    def fetch(self, here: Path) -> None:
        """Have the content of a file of an opened checkpoint here."""

    @contextmanager
    def new_file(self, path: Path) -> Iterator[BinaryIO]:
        """Write, in the block, a file that appears at `path` of the run once it is whole and on the disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.tmp")
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


class StagedFiles:
    """The files of one learner, on the `disk` of its run, with the methods of a checkpoint engine of DeepSpeed.

    `keeps`: copies of what is saved stay in memory until `write`. A file for whose copy the node has no memory left is
    written at once: training waits, and is not ended by the kernel.
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
        """Take the files that are saved in the block, for one checkpoint. The one before must have been written."""
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
        """Write what was kept, from any thread; return all files of the checkpoint, which `disk` has yet to settle."""
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
        """Have DeepSpeed cut views out of their storages, which a copy in memory does anyway."""
        return not self.keeps


class HostMemory:
    """Host copies of a checkpoint's tensors. The next checkpoint takes the same memory: new pages are slow to get."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._num_used = 0

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Copy over what the block before copied; at the end of this one all its copies are whole."""
        self._num_used = 0
        yield
        del self._held[self._num_used :]
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def has_room_for(self, state: Any, learners_on_node: int) -> bool:
        """Tell whether a copy leaves free memory, when each of the node's learners makes one."""
        reused = sum(_allocated(held.nbytes, pinned=held.is_pinned()) for held in self._held[self._num_used :])
        new, memory = _num_bytes(state) - reused, host_memory()
        return new <= 0 or new < (memory.available - _KEPT_FREE * memory.total) / learners_on_node

    def copy(self, state: Any) -> Any:
        """Copy a state, a tensor under two names once. Its containers are dicts, lists and tuples, as DeepSpeed's."""
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, Tensor):
                key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if value.numel() == 0 or key not in copies:
                    copies[key] = self._next(value)
                    copies[key].copy_(value.detach(), non_blocking=True)
                return copies[key]
            if type(value) in (dict, OrderedDict):
                return type(value)((key, copied(item)) for key, item in value.items())
            if type(value) in (list, tuple):
                return type(value)(map(copied, value))
            return copy.deepcopy(value)

        return copied(state)

    def _next(self, tensor: Tensor) -> Tensor:
        """Return memory for `tensor`: that of the last checkpoint's tensor in its place, which is of the same form."""
        index, self._num_used = self._num_used, self._num_used + 1
        held = self._held[index] if index < len(self._held) else None
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._held[index : index + 1] = [fresh]
        return fresh


def _num_bytes(state: Any) -> int:
    """Return the host memory that copies of a state's tensors take."""
    if isinstance(state, Tensor):
        return _allocated(state.nbytes, pinned=state.is_cuda)
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_num_bytes, items))


def _allocated(num_bytes: int, *, pinned: bool) -> int:
    """Return what an allocation takes: torch rounds pinned memory up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if pinned and num_bytes else num_bytes


def deepspeed_globals() -> list[Any]:
    """Return the classes in DeepSpeed's optimizer states besides tensors and plain data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, OffloadDeviceEnum, ZeroStageEnum, fragment_address]
