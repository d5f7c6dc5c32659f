"""The nodes that an attempt trains on: all it was given at first, then those that are left of them.

Consumes the place's allocation; produces `nodes`, with Ray across them, and after a loss the next one, on the
nodes that still answer.
"""

from __future__ import annotations

from pathlib import Path

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.supervisor.driver_process import contract_environment
from hpc_grpo.launch.supervisor.nodes import Nodes
from hpc_grpo.run.paths import RunDir

_TEARDOWN_DEADLINE_S = 30.0
"""A node whose agent has not ended in order by then is taken for lost."""


class Formation:
    """`allocation` are the nodes of now; `ray_address_file` is where the driver waits for the address of their Ray."""

    def __init__(self, run: RunDir, launch: LaunchConfig, place: Place, attempt: int, working_dir: Path) -> None:
        self._run, self._launch, self._attempt, self._working_dir = run, launch, attempt, working_dir
        self._place = place
        self.allocation = place.allocation()
        self._dir = run.attempt(attempt, self.allocation.job_id)
        self._least = launch.slurm.min_nodes or len(self.allocation.nodes)
        self._number = 0
        self.ray_address_file = self._dir / "ray_address"
        self.nodes = self._make_nodes()

    @property
    def was_formed_again(self) -> bool:
        return self._number > 0

    def form_again(self) -> bool:
        """End every agent and start anew on the nodes that still answer; False when they are too few."""
        self.nodes.tear_down(_TEARDOWN_DEADLINE_S)
        left = self.nodes.answering()
        if len(left) < self._least or self.allocation.head not in left:
            return False
        self._number += 1
        self.ray_address_file.unlink(missing_ok=True)
        self.allocation = self.allocation.only(left)
        self.nodes = self._make_nodes()
        self.nodes.start()
        return True

    def _make_nodes(self) -> Nodes:
        allocation, tag = self.allocation, f"{self.allocation.job_id}-{self._attempt}"
        return Nodes(
            self._place,
            allocation,
            self._launch,
            self._run.secret,
            self._dir,
            tag=f"{tag}-{self._number}" if self._number else tag,
            working_dir=self._working_dir,
            contract=contract_environment(
                self._attempt, self._dir, self.ray_address_file, len(allocation.nodes), allocation.ends_at
            ),
        )
