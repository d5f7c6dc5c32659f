"""Where the driver learns which Ray is the run's: it is started while Ray still comes up.

So its imports and its checks of the user's inputs take no time of their own, and a mistake ends the attempt early.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from hpc_grpo.run.contract import RAY_ADDRESS_FILE_VARIABLE

_POLL_S = 0.25


def wait_for_ray(is_asked_to_stop: Callable[[], bool]) -> str | None:
    """The address of the run's Ray; None when asked to stop before there is one.

    Has no deadline of its own: the supervisor ends this process when Ray does not come up.
    """
    path = Path(os.environ[RAY_ADDRESS_FILE_VARIABLE])
    while not path.exists():
        if is_asked_to_stop():
            return None
        time.sleep(_POLL_S)
    return path.read_text()
