"""The isolation that this machine gives programs of `code`, and the tests that need it."""

from __future__ import annotations

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards.sandbox.isolation import find_isolation


def strong_isolation() -> str:
    try:
        return find_isolation("strong")
    except ConfigError:
        return ""


ISOLATION = strong_isolation()
needs_isolation = pytest.mark.skipif(not ISOLATION, reason="this machine gives no user namespaces, nor bubblewrap")
