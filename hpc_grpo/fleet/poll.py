"""The loop that visits VMs: their GPUs, their attempts, the logs; it renews leases and settles what nobody started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import DatabaseAwayError
from hpc_grpo.fleet.machine import VisitError, Vm
from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen, Observation, Orders, Request
from hpc_grpo.fleet.observe import attempts_of, end_revoked, missed, record, take_due
from hpc_grpo.system.say import say

_LOOK_S = 0.5
_MAX_AT_ONCE = 256
_MAX_PIECES = 64
"""Of a log's pieces, in a row: a job that prints without end must not keep a VM from being polled."""


class Poller:
    """Visits each VM that is due in a task of its own: one that does not answer delays no other."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._known: dict[int, tuple[AttemptKey, ...]] = {}
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def run(self) -> None:
        """Poll for ever."""
        try:
            while True:
                await self.start_due()
                await asyncio.sleep(min(_LOOK_S, self._controller.settings.poll_s / 4))
        finally:
            for task in self._busy.values():
                task.cancel()

    async def start_due(self) -> None:
        """Begin a visit of every VM that is due, but for one that is being visited."""
        due = await asyncio.to_thread(take_due, self._controller.db, self._controller.settings)
        for vm in due:
            if vm.vm_id not in self._busy:
                task = asyncio.create_task(self._poll(vm))
                self._busy[vm.vm_id] = task
                task.add_done_callback(partial(self._over, vm.vm_id))

    def _over(self, vm_id: int, _task: asyncio.Task[None]) -> None:
        self._busy.pop(vm_id, None)

    async def round(self) -> None:
        """Visit what is due, to the end."""
        await self.start_due()
        await asyncio.gather(*self._busy.values())

    async def _poll(self, vm: Vm) -> None:
        async with self._slots:
            try:
                for _ in range(_MAX_PIECES):
                    if not await self.visit(vm):
                        return
            except DatabaseAwayError:
                return  # the loop says so; nothing was renewed

    async def visit(self, vm: Vm) -> bool:
        """Visit a VM once; returns whether more of a log is there than one visit brings."""
        controller = self._controller
        settings = controller.settings
        known = self._known.get(vm.vm_id, ())
        offsets = {key.folder: controller.logs.size(key) for key in known}
        has_more = False

        async def decide(seen: Observation) -> Orders:
            nonlocal has_more
            self._known[vm.vm_id] = tuple(one.key for one in seen.attempts)
            own = await asyncio.to_thread(attempts_of, controller.db, vm.vm_id)
            own_seen = [one for one in seen.attempts if one.key in own]
            whole, has_more = await asyncio.to_thread(self._keep_logs, own_seen, offsets)
            recorded = await asyncio.to_thread(record, controller.db, vm.vm_id, seen, whole, settings)
            if recorded.frees_gpus:
                controller.bell.nudge()
            return recorded.orders

        try:
            async with asyncio.timeout(settings.visit_s):
                outcome = await controller.machine(vm).visit(Request(vm.work_dir, vm.nvidia_smi, offsets), decide)
        except (VisitError, TimeoutError) as error:
            why = str(error) or f"no answer within {settings.visit_s:.0f} s"
            await controller.drop(vm)
            await asyncio.to_thread(missed, controller.db, vm.vm_id, why)
            return False
        if outcome.revoked:
            await asyncio.to_thread(end_revoked, controller.db, outcome.revoked, settings)
            controller.bell.nudge()
        return has_more

    def _keep_logs(self, seen: Sequence[AttemptSeen], offsets: dict[str, int]) -> tuple[frozenset[AttemptKey], bool]:
        """Write what came of the logs; returns the attempts whose log is whole, and whether more is to be fetched."""
        whole, behind = set(), False
        for one in seen:
            try:
                is_whole = self._controller.logs.add(one, offsets.get(one.key.folder, 0))
            except OSError as error:
                say(f"The log of {one.key.job_id} could not be kept: {error}")
                continue
            behind = behind or not is_whole
            if is_whole:
                whole.add(one.key)
        return frozenset(whole), behind
