"""The driver, but before its last step it waits to be asked to stop, or for a file `go` in the run directory.

A test that interrupts a run some steps after its begin then meets it on a machine of any speed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from hpc_grpo.driver import main as train
from hpc_grpo.driver.journal import Session
from hpc_grpo.run.pulse import PULSE

GO = "go"
WAITS = "waiting for the test"
_LOOK_S = 0.05
_should_go_on = Session.should_go_on


def should_go_on(self: Session, state: Any, **options: Any) -> bool:
    if state.step == self.length.total_steps - 1:
        with PULSE.working(WAITS):
            while self.stop.reason(0.0) is None and not (self.run_dir.path / GO).exists():
                time.sleep(_LOOK_S)
    return _should_go_on(self, state, **options)


if __name__ == "__main__":
    Session.should_go_on = should_go_on
    sys.exit(train.main())
