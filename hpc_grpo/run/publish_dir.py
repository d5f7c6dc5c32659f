"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_STAGED, _RETIRED = ".tmp", ".old"


def staging_path(final: Path) -> Path:
    """Where the content of `final` is prepared: beside it, since only a rename within a file system is atomic."""
    return final.with_name(f".{final.name}{_STAGED}")


def start_staging(final: Path) -> Path:
    """An empty staging folder; what an interrupted attempt left there is removed."""
    staging = staging_path(final)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def publish(final: Path) -> None:
    """Move the staged content to `final`, replacing what is there (the same step, trained again after a crash)."""
    staging = staging_path(final)
    for file in staging.rglob("*"):
        if file.is_file():
            _fsync(file)
    retired = final.with_name(f".{final.name}{_RETIRED}")
    if retired.exists():
        shutil.rmtree(retired)
    if final.exists():
        final.replace(retired)
    staging.replace(final)
    _fsync(final.parent)
    if retired.exists():
        shutil.rmtree(retired)


def recover(parent: Path) -> None:
    """Put right what processes that were killed while publishing left below `parent`.

    To be called while nothing publishes there.
    """
    for retired in parent.glob(f".step_*{_RETIRED}"):
        final = parent / retired.name[1 : -len(_RETIRED)]
        if final.exists():
            shutil.rmtree(retired)
        else:
            retired.replace(final)  # killed between the two renames
    for staging in parent.glob(f".step_*{_STAGED}"):
        shutil.rmtree(staging)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
