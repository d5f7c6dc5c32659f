"""A spawn context whose processes do not import the parent's main module.

Plain spawn runs the parent's `__main__` again in every child. In a Ray actor that is Ray's worker script,
which imports ray; in the driver it would import torch. A killed worker's successor would take seconds to
start instead of a tenth of one, and rewards never live in `__main__`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

from hpc_grpo.run.contract import SHM_DIR_VARIABLE

_patching = threading.Lock()


class LightSpawnContext(SpawnContext):
    """Use as any multiprocessing context. Its semaphores bear the name of the attempt's folder in shared memory, with
    which the node's agent removes those of killed processes."""

    def __init__(self) -> None:
        super().__init__()
        if folder := os.environ.get(SHM_DIR_VARIABLE):
            vars(current_process())["_config"]["semprefix"] = f"/{Path(folder).name}"


class _LightProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        return _LightPopen(process_obj)


class _LightPopen(popen_spawn_posix.Popen):
    def _launch(self, process_obj: Any) -> None:
        with _without_main_module():
            super()._launch(process_obj)  # type: ignore[misc]


LightSpawnContext.Process = _LightProcess


@contextmanager
def _without_main_module() -> Iterator[None]:
    """What a child is told to prepare lacks the main module, for processes that this thread starts meanwhile.

    Multiprocessing has no switch for it; other threads keep its usual behaviour.
    """
    thread = threading.get_ident()
    with _patching:
        original = spawn.get_preparation_data

        def preparation_data(name: str) -> dict[str, Any]:
            data = original(name)
            if threading.get_ident() != thread:
                return data
            return {key: value for key, value in data.items() if not key.startswith("init_main")}

        spawn.get_preparation_data = preparation_data
        try:
            yield
        finally:
            spawn.get_preparation_data = original
