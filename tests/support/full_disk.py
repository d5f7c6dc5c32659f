"""A disk that is full when a file is opened for the first time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def full_once(monkeypatch: pytest.MonkeyPatch, suffix: str) -> list[Path]:
    """Refuse the first opening of a file whose path ends in `suffix`; the list has its path then."""
    refused: list[Path] = []
    opened = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(suffix) and not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    return refused
