"""Lines that tests print at the end of the session, and skips: in CI a skip that is not named here is a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import pytest

ALLOWED_SKIPS = (
    "this torch is built with NCCL",
    "its model is installed by `make demo`",
    "bubblewrap: ",
    "Debian's unstable gives no Apptainer",
)
"""Reasons that hold on a machine of CI. bubblewrap may be missing, and shows root no Python below /root."""

_shown: list[str] = []


@pytest.fixture
def show() -> Callable[[str], None]:
    """Print a line at the end of the session."""
    return _shown.append


def pytest_configure() -> None:
    """Undo what `nohup` and `&` of a shell do: tests send themselves and their processes these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _shown:
        terminalreporter.line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _without_unnamed_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _without_unnamed_skips((yield))


def _without_unnamed_skips(report: Any) -> Any:
    """Turn a skip into a failure in CI, unless ALLOWED_SKIPS has its reason."""
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return report
    reason = str(report.longrepr[2])
    if not any(allowed in reason for allowed in ALLOWED_SKIPS):
        report.outcome, report.longrepr = "failed", f"Skipped in CI, and tests/conftest.py does not allow it: {reason}"
    return report
