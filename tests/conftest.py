"""Lines that tests print at the end of the session: the tables of what they measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_shown: list[str] = []


@pytest.fixture
def show() -> Callable[[str], None]:
    """Print a line at the end of the session."""
    return _shown.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _shown:
        terminalreporter.line(line)
