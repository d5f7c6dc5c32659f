"""Run one attempt of a frozen run on the available nodes: `hpc-grpo train`, and the command of a submitted job.

Runs in the supervisor's process. Reads the run directory and the place; returns an exit code after one supervised
attempt. Waits for a place that does not answer yet, and for the end of an attempt that still holds the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from hpc_grpo.errors import (
    EXIT_COMPLETE,
    EXIT_CRASH,
    EXIT_RESUMABLE,
    ConfigError,
    HpcGrpoError,
    LaunchError,
    RunHeldError,
)
from hpc_grpo.launch.chain.link import ChainLink, LinkJob
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.launch.place import find_place
from hpc_grpo.launch.place.base import Allocation, End, Place
from hpc_grpo.launch.place.container import container_of
from hpc_grpo.launch.place.job_queue import job_python
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup, stage_of
from hpc_grpo.launch.supervisor.nodes import Nodes
from hpc_grpo.launch.supervisor.supervisor import Supervisor
from hpc_grpo.launch.supervisor.transitions import end_by_error
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.lock import LockOwner, RunLock, abandoned_by, retire
from hpc_grpo.run.paths import RunDir, tokenized_data
from hpc_grpo.run.source import entry, own_command
from hpc_grpo.system.commands import run_in_foreground
from hpc_grpo.system.say import say
from hpc_grpo.system.signals import Signals, outliving_the_warning

_ASK_AGAIN_S = (2.0, 10.0, 30.0, 60.0)


def run_attempt(
    run: RunDir, driver: str, origin: LinkJob | None = None, place: Place | None = None, *, comes_back: bool = False
) -> int:
    """Run one attempt and return its exit code. Raises HpcGrpoError.

    On another node than the head, this process becomes the attempt on the head. With `comes_back`, it starts a child
    for the attempt and waits. `driver` is a module or a .py file; its argument is the run directory. With an `origin`,
    the job was submitted only for this attempt and may have successors. Default of `place`: the place found here.
    """
    config = read_config(run)
    if missing := [name for name in config.launch.pass_env if not name.endswith("*") and name not in os.environ]:
        say(f"launch.pass_env: training runs without {', '.join(missing)}, which this shell does not set.")
    place = (place or find_place()).for_run(run, config.launch)
    queue = place.queue if origin else None
    if run.is_complete() and queue is None:  # Even for a complete run, a job must record that its chain has ended.
        say(f"The run in {run.path} is already complete; raise train.total_* to extend it, or give a new run.name.")
        _close(place, End("complete", EXIT_COMPLETE, "The run is complete."))
        return EXIT_COMPLETE
    link = None
    if origin is not None and queue is not None:
        link = ChainLink(run, config.launch, queue, replace(origin, job_id=place.job_id, driver=driver))
        link.have_two_wait()
    try:
        allocation = allocation_of(place, is_patient=origin is not None)
        if allocation.this_node != allocation.head:
            words = ["attempt", str(run.path), "--driver", driver, "--link" if origin else "--no-link"]
            words += ["--successor-of", origin.successor_of] if origin else []
            command = [job_python(config.launch), "-E", *entry(run), *words]
            # Run the attempt on the head node: salloc leaves its shell on the login node.
            argv, environ = place.start_command(allocation.head, command), place.start_environment(os.environ)
            if comes_back:
                return run_in_foreground(argv, environ)
            os.execvpe(argv[0], argv, environ)
        if link is not None and (code := _end_of_chain(run, link)) is not None:
            return code
        folder = working_dir(run)
        container = container_of(config.launch, config, [run.path, folder, tokenized_data(config)])
        if container is not None:
            container.refuse_absent()
        # Only tests give a driver as a file. Most of these start no engines, so templates would import for nothing.
        has_templates, stage = not driver.endswith(".py"), stage_of(config, folder, os.environ)
        number = run.next_attempt_number()
        setup = AttemptSetup(
            run, config.launch, place, allocation, number, folder, container, has_templates=has_templates, stage=stage
        )
        program = [driver] if driver.endswith(".py") else ["-m", driver]
        supervisor = Supervisor(setup, Nodes(setup), own_command(*program, str(run.path)))
    except HpcGrpoError as error:  # Nothing runs yet, but nodes may wait.
        if link is not None and isinstance(error, ConfigError):
            link.give_up(str(error))
        _close(place, end_by_error(error, ""))
        raise
    record = supervisor.record
    try:
        return supervise(supervisor, run, link, place)
    finally:
        code = EXIT_CRASH if record.exit_code is None else record.exit_code
        _close(place, End(record.exit_kind, code, record.why))


def _close(place: Place, end: End) -> None:
    """Tell waiting nodes how the attempt ended. A signal does not interrupt this."""
    with Signals():
        place.close(end)


def allocation_of(place: Place, is_patient: bool, sleep: Callable[[float], None] = time.sleep) -> Allocation:
    """Return the attempt's nodes. With `is_patient`, retry for about two minutes: an error would end the chain."""
    for pause_s in _ASK_AGAIN_S if is_patient else ():
        try:
            return place.allocation()
        except LaunchError as error:
            say(f"{error} Asking again in {pause_s:.0f} s.")
            sleep(pause_s)
    return place.allocation()


def _end_of_chain(run: RunDir, link: ChainLink) -> int | None:
    """Let the job decide whether its chain continues. Return the exit code if it does not; None if it does.

    Closes the record of the killed previous job, if any, and sends the news to the user.
    """
    decision = link.decide()
    if decision.why:
        say(decision.why)
    if owner := abandoned_by(run, link.before):
        close_record(run, owner)
        if not decision.goes_on:
            retire(run.holder, owner)
    link.tell()
    if decision.goes_on:
        return None
    return EXIT_COMPLETE if run.is_complete() else EXIT_CRASH if decision.gave_up else EXIT_RESUMABLE


def close_record(run: RunDir, owner: LockOwner) -> None:
    """Set `ended_at` in a killed attempt's record to the last beat in its lock."""
    for record in read_attempts(run):
        if record.attempt == owner.attempt and record.ended_at is None:
            record.ended_at = owner.beat_at
            record.save(run.attempt(record.attempt, record.job_id))


def supervise(supervisor: Supervisor, run: RunDir, link: ChainLink | None, place: Place) -> int:
    """Hold the run during the attempt, and update the successor. Return the attempt's exit code."""
    record = supervisor.record
    before = link.before if link else None
    try:
        lock = RunLock.take(run, record.job_id, record.attempt, before=before, asked=place.owner_lives)
    except RunHeldError:
        if link is not None:
            link.withdraw()
        raise
    # The walltime warning may come after the driver's end, while the successor is updated. Callbacks run in reverse.
    with outliving_the_warning(), ExitStack() as at_the_end:
        supervisor.chore = lock.note_work
        if link is None:
            at_the_end.callback(lock.release)
            return supervisor.run()
        at_the_end.callback(link.tell)  # last, because it may be slow
        at_the_end.callback(lock.release)
        link.start()

        def chore(work: str) -> None:
            lock.note_work(work)
            link.try_again()

        supervisor.chore = chore
        at_the_end.callback(link.finish, record)
        return supervisor.run()
