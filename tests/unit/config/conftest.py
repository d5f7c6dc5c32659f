from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.files import MINIMAL, write


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """A file with the least that a config must say."""
    return write(tmp_path / "minimal.yaml", MINIMAL)
