"""The isolation that this machine gives to programs of a model's, and the tests that need it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards.sandbox.isolation import find_isolation


def strong_isolation() -> str:
    """Return the isolation. Where there is none, only a machine that is no CI goes on: a skip is not seen in CI."""
    try:
        return find_isolation("strong")
    except ConfigError:
        if os.environ.get("CI") == "true":
            raise
        return ""


SHOWN_IN_TMP = sorted({Path(path).parts[2] for path in (sys.prefix, sys.base_prefix) if path.startswith("/tmp/")})
"""What a program sees in /tmp before it writes there: where this Python lies below it."""
ISOLATION = strong_isolation()
needs_isolation = pytest.mark.skipif(not ISOLATION, reason="this machine gives no user namespaces, nor bubblewrap")
