"""What tests/conftest.py makes of skips in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("of", ["pytest.skip({!r}, allow_module_level=True)", "pytestmark = pytest.mark.skip({!r})"])
@pytest.mark.parametrize(
    ("ci", "reason", "fails"),
    [("true", "it is Tuesday", True), ("true", "bubblewrap: none is here", False), ("", "it is Tuesday", False)],
)
def test_a_skip_whose_reason_is_not_named_fails_in_ci(
    tmp_path: Path, of: str, ci: str, reason: str, fails: bool
) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n{of.format(reason)}\ndef test_it(): ...\n")
    words = ["-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path]
    environ = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)) == fails, done.stdout
    assert (f"tests/conftest.py does not allow it: Skipped: {reason}" in done.stdout) == fails, done.stdout
