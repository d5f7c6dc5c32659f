"""What the loops share: the database, the machines and the bell, and the retry while the database is away."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence

from hpc_grpo.fleet.db import Database, DatabaseAwayError
from hpc_grpo.fleet.doorbell import Bell
from hpc_grpo.fleet.logs import JobLogs
from hpc_grpo.fleet.machine import Decide, LocalMachine, Machine, SshMachine, VisitError, Vm
from hpc_grpo.fleet.messages import Outcome, Request
from hpc_grpo.fleet.observe import missed
from hpc_grpo.fleet.settings import Fleet
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import end_signals

_AGAIN_S = (0.5, 1.0, 2.0, 5.0)


class Controller:
    """One process of a fleet's control. Several may run at once: each decision is a compare-and-set in the database."""

    def __init__(self, fleet: Fleet, make_machine: Callable[[Vm], Machine] | None = None) -> None:
        self.settings = fleet.settings
        self.db = Database(fleet.database_url)
        self.logs = JobLogs(fleet.logs)
        self.bell = Bell(fleet.nats_url)
        self._make_machine = make_machine or (
            lambda vm: LocalMachine(vm) if vm.transport == "local" else SshMachine(vm, fleet.known_hosts)
        )
        self._machines: dict[int, tuple[Vm, Machine]] = {}

    async def visit(self, vm: Vm, request: Request, decide: Decide) -> Outcome:
        """Visit a VM in at most `visit_s`. Raises VisitError, after it wrote the reason into the VM's row."""
        known, machine = self._machines.get(vm.vm_id, (None, None))
        if machine is None or known != vm:  # the first visit, or the row has changed
            if machine is not None:
                await self._leave(vm, machine)
            machine = self._make_machine(vm)
            self._machines[vm.vm_id] = vm, machine
        try:
            async with asyncio.timeout(self.settings.visit_s):
                return await machine.visit(request, decide)
        except (VisitError, TimeoutError) as error:
            is_before_orders = isinstance(error, VisitError) and error.is_before_orders
            why = str(error) or f"no answer within {self.settings.visit_s:.0f} s"
            await self._leave(vm, machine)
            await asyncio.to_thread(missed, self.db, vm.vm_id, why)
            raise VisitError(why, is_before_orders) from error

    async def _leave(self, vm: Vm, machine: Machine) -> None:
        """Close the connection to a VM. Another visit may have made a new one meanwhile, which stays."""
        if self._machines.get(vm.vm_id, (vm, None))[1] is machine:
            del self._machines[vm.vm_id]
        await machine.close()

    async def run(self, loops: Sequence[Callable[[], Awaitable[None]]], *, listens: bool) -> None:
        """Run the loops until a signal. Without a controller, jobs continue for the length of their lease.

        `listens`: also receive jobs that other processes announce, for a loop that dispatches.
        """
        ended = asyncio.Event()
        for sig in (*end_signals(), signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, ended.set)
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(_run_again(loop)) for loop in loops]
        tasks += [asyncio.create_task(self.bell.listen())] if listens else []
        tasks.append(asyncio.create_task(ended.wait()))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.close()
        for task in done:
            if error := task.exception():
                raise error

    async def close(self) -> None:
        for _, machine in self._machines.values():
            with contextlib.suppress(OSError):
                await machine.close()
        self._machines.clear()
        self.db.close()


async def _run_again(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop, and run it again after the database was away."""
    tries = 0
    while True:
        began = asyncio.get_running_loop().time()
        try:
            await loop()
        except DatabaseAwayError as error:
            if asyncio.get_running_loop().time() - began > _AGAIN_S[-1] * 2:
                tries = 0
            if tries == 0:
                say(f"{error} Jobs continue; the controller waits for the database.")
            await asyncio.sleep(_AGAIN_S[min(tries, len(_AGAIN_S) - 1)])
            tries += 1
