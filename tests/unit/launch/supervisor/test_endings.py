"""How an attempt ended, by its driver's exit or by an error: kind, exit code and reason."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.errors import ConfigError, LaunchError, NodesUnavailableError
from hpc_grpo.launch.supervisor.events import (
    DriverEnded,
    RunFacts,
)
from hpc_grpo.launch.supervisor.transitions import end_by_error, end_of_driver

NOT_IN_RAY = NodesUnavailableError("After 300 s not in Ray: n2.", ["n2"])


@pytest.mark.parametrize(
    ("returncode", "complete", "signalled", "lost", "kind", "code"),
    [
        (0, True, "", {}, "complete", 0),
        (-9, True, "", {"n2": "Ray ended"}, "complete", 0),
        (0, False, "", {}, "crash", 1),
        (75, False, "", {}, "resumable", 75),
        (75, False, "SIGTERM", {}, "resumable", 75),
        (78, False, "", {}, "config", 78),
        (1, False, "SIGINT", {}, "cancelled", 1),
        (1, False, "", {"n2": "Ray ended"}, "node_lost", 1),
        (69, False, "", {}, "node_lost", 1),
        (78, False, "", {"n2": "Ray ended"}, "node_lost", 1),
        (3, False, "", {}, "crash", 3),
        (-9, False, "", {}, "crash", 137),
    ],
)
def test_how_a_driver_ended(
    returncode: int, complete: bool, signalled: str, lost: dict[str, str], kind: str, code: int
) -> None:
    end = end_of_driver(DriverEnded(returncode, RunFacts(10, is_complete=complete)), signalled, lost)
    assert (end.kind, end.code) == (kind, code)


@pytest.mark.parametrize(
    ("returncode", "why"),
    [
        (3, "The driver crashed with exit code 3: KeyError: 'x'; see driver.log."),
        (78, "Something must be changed first: KeyError: 'x'; see driver.log."),
        (-127, "The driver was killed by signal 127: KeyError: 'x'; see driver.log."),
        (-6, "The driver was killed by SIGABRT: KeyError: 'x'; see driver.log."),
        (-9, "The driver was killed by SIGKILL (often the kernel, out of memory); see driver.log."),
        (75, "Checkpointed with more to do; start it again to carry on."),
        (0, "The driver exited with 0 but wrote no COMPLETE: it ended without finishing."),
    ],
)
def test_the_drivers_last_error_is_told_where_it_is_the_cause(returncode: int, why: str) -> None:
    assert end_of_driver(DriverEnded(returncode, last_error="KeyError: 'x'"), "", {}).why == why


@pytest.mark.parametrize(
    ("error", "signalled", "kind", "code"),
    [
        (NOT_IN_RAY, "", "bringup_failed", 69),
        (ConfigError("launch.env.X: LOCALDIR is not set."), "", "config", 78),
        (LaunchError("SIGTERM while the nodes were coming up."), "SIGTERM", "cancelled", 1),
        (KeyError("x"), "", "crash", 1),
    ],
)
def test_how_an_attempt_ended_whose_supervisor_failed(error: Any, signalled: str, kind: str, code: int) -> None:
    end = end_by_error(error, signalled)
    assert (end.kind, end.code) == (kind, code)
