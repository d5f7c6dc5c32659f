"""When a crashed driver is started again on the nodes it had."""

from __future__ import annotations


class Restarts:
    """Allows restarts as long as they lead somewhere.

    >>> restarts = Restarts(max_stalled=1)
    >>> [restarts.allowed(steps) for steps in (0, 3, 0, 0)]
    [True, True, True, False]
    """

    def __init__(self, max_stalled: int) -> None:
        self._max_stalled = max_stalled
        self._stalled = 0

    def allowed(self, num_steps: int) -> bool:
        """Whether to start again after a crash; `num_steps` is what the driver had saved in checkpoints."""
        if self._max_stalled == 0:
            return False
        self._stalled = 0 if num_steps > 0 else self._stalled + 1
        return self._stalled <= self._max_stalled
