"""The program of one visit, on a VM: `python -m hpc_grpo.fleet.visit`, a fixed command line; all else is on its stdin.

See messages.py for what is said. It looks, says what it sees, waits for orders, obeys and ends; the jobs' runners stay.
Whatever a job's row says reaches this machine as JSON, and its processes as words: no shell reads any of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_grpo.fleet.attempt_folder import AttemptFolder, marked_processes, prune, uptime
from hpc_grpo.fleet.gpus import NoGpusError, read_gpus
from hpc_grpo.fleet.messages import (
    ORDERS_S,
    PROTOCOL,
    AttemptKey,
    AttemptSeen,
    Observation,
    Orders,
    Outcome,
    Request,
    decode_orders,
    decode_request,
    encode,
)
from hpc_grpo.fleet.states import Ending

_LOG_BYTES = 1 << 20
_BEGIN_S = 10.0


def main() -> None:
    """Hold one visit over stdin and stdout. A controller that leaves in the middle changes nothing."""
    line = sys.stdin.buffer.readline()
    request = decode_request(line)
    if request.protocol != PROTOCOL:
        _say(Observation(problem=f"this VM's hpc-grpo speaks protocol {PROTOCOL}, the controller {request.protocol}"))
        return
    work_dir = Path.home() / Path(request.work_dir).expanduser()
    observation = observe(work_dir, request)
    seen_at = uptime()  # a slow nvidia-smi uses up none of the time for orders
    _say(observation)
    if not (line := _orders_line()):
        return
    if (took_s := uptime() - seen_at) > ORDERS_S:
        _say(Outcome(problem=f"the orders came {took_s:.0f} s after the observation, later than {ORDERS_S:.0f} s"))
        return
    _say(obey(work_dir, decode_orders(line), seen_at))


def observe(work_dir: Path, request: Request) -> Observation:
    """Return the GPUs and the attempts of this machine."""
    work_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        gpus = read_gpus(request.nvidia_smi)
    except NoGpusError as error:
        return Observation(attempts=_attempts(work_dir, request), problem=str(error))
    return Observation(gpus, _attempts(work_dir, request))


def obey(work_dir: Path, orders: Orders, seen_at: float) -> Outcome:
    """Do what a controller has committed; a lease counts from `seen_at`, before the controller could commit it."""
    for key in orders.renew:
        folder = _folder(work_dir, key)
        if folder.path.is_dir():
            folder.renew(seen_at)
    for key in orders.cancel:
        folder = _folder(work_dir, key)
        if folder.path.is_dir():
            folder.cancel()
    revoked = tuple(key for key in orders.revoke if _revoke(_folder(work_dir, key), key))
    for key in orders.forget:
        _forget(work_dir, key)
    if orders.forget:
        prune(work_dir / "over")
    begun: list[tuple[AttemptKey, subprocess.Popen[bytes]]] = []
    failed: list[tuple[AttemptKey, str]] = []
    for spec in orders.start:
        key = AttemptKey(spec["job_id"], spec["attempt"])
        if (runner := _begin(_folder(work_dir, key), key, spec, seen_at)) is None:
            failed.append((key, "this attempt was decided before"))
        else:
            begun.append((key, runner))
    deadline = time.monotonic() + _BEGIN_S
    failed += [(key, why) for key, one in begun if (why := _why_not_begun(_folder(work_dir, key), one, deadline))]
    started = {key for key, _ in begun} - {key for key, _ in failed}
    return Outcome(tuple(sorted(started)), revoked, tuple(failed))


def _attempts(work_dir: Path, request: Request) -> tuple[AttemptSeen, ...]:
    found = sorted(path for path in (work_dir / "attempts").glob("*") if path.is_dir())
    return tuple(seen for path in found if (seen := _seen(AttemptFolder(path), request)) is not None)


def _seen(folder: AttemptFolder, request: Request) -> AttemptSeen | None:
    try:
        return _look(folder, request)
    except FileNotFoundError:  # another visit has forgotten it meanwhile
        return None


def _look(folder: AttemptFolder, request: Request) -> AttemptSeen | None:
    key, spec = folder.key(), folder.spec()
    if key is None:  # made this moment by another visit, or by one that was killed there: `revoke` settles it
        return None
    if not folder.is_of_this_machine():
        return None
    lives = folder.runner_lives()
    ended = folder.ending()
    if ended is None and not lives:
        ended = folder.ending() or _end_of_dead_runner(folder, spec)
    log, size = _read_log(folder.log, request.log_offsets.get(key.folder, 0)) if request.with_logs else (b"", 0)
    return AttemptSeen(key, tuple(spec["gpus"]) if spec else (), ended, size, log)


def _end_of_dead_runner(folder: AttemptFolder, spec: dict[str, object] | None) -> Ending | None:
    """Write the end of an attempt whose runner was killed; None while processes of its job are left.

    The kernel has told the job's first process to end; what is left when the time for a checkpoint is over is killed.
    """
    age_s = time.time() - folder.path.stat().st_mtime
    if not (folder.path / "runner.json").exists() and age_s < 2 * _BEGIN_S:
        return None  # it is being started
    if pids := marked_processes(folder.path):
        died = folder.path / "runner_died"
        if not died.exists():
            died.touch()
        if spec is None or time.time() - died.stat().st_mtime > float(str(spec["end_s"])):
            for pid in pids:
                _kill(pid)
        return None
    began = (folder.path / "runner.json").exists()
    ending = Ending("exit", None, "its runner died: the VM was started anew, or somebody killed it")
    ending = ending if began else Ending("not_started", None, "its runner did not begin")
    folder.end(ending)
    if not began and (folder.path / "runner.json").exists():  # it has begun this moment
        folder.retract()
        return None
    return ending


def _read_log(path: Path, offset: int) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset)
            return file.read(_LOG_BYTES), size
    except FileNotFoundError:
        return b"", 0


def _revoke(folder: AttemptFolder, key: AttemptKey) -> bool:
    """Decide that an attempt never starts here, or never goes on; False if it has begun and may still run.

    A runner whose folder was deleted ends its job, which may take `end_s`: the attempt is not over before that. A
    machine that was given another name takes none of its attempts for its own: their leases run out.
    """
    if not folder.path.exists() and marked_processes(folder.path):
        return False
    if folder.make():
        folder.write_key(key)
        folder.end(Ending("not_started", None, "it was revoked"))
        return True
    if folder.key() is None:  # a visit was killed before it had written anything: nothing runs
        folder.write_key(key)
        folder.end(Ending("not_started", None, "its start was cut off"))
    if folder.ending() is None and folder.is_abandoned():
        folder.end(Ending("lost", None, "its machine has another name now"))
    ending = folder.ending()
    return ending is not None and ending.kind != "exit"


def _forget(work_dir: Path, key: AttemptKey) -> None:
    """Put an attempt that is over, and whose log was fetched, out of the way; the log itself goes."""
    folder = _folder(work_dir, key)
    if folder.ending() is None:
        return
    over = work_dir / "over" / key.folder
    over.parent.mkdir(exist_ok=True, mode=0o700)
    folder.log.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another visit was first
        folder.path.replace(over)


def _begin(
    folder: AttemptFolder, key: AttemptKey, spec: dict[str, object], seen_at: float
) -> subprocess.Popen[bytes] | None:
    """Start a runner; None if the attempt has begun before, or was revoked."""
    if (folder.path.parents[1] / "over" / key.folder).exists() or not folder.make():
        return None
    folder.write_spec(spec)
    folder.renew(seen_at)
    folder.write_key(key)
    argv = [sys.executable, "-m", "hpc_grpo.fleet.runner", str(folder.path)]
    with (folder.path / "runner.log").open("wb") as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _why_not_begun(folder: AttemptFolder, runner: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait until a runner says that it is there; returns why it is not, "" also for one that is slow and lives."""
    while not (folder.path / "runner.json").exists() and runner.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if (folder.path / "runner.json").exists() or runner.poll() is None:
        return ""
    said = (folder.path / "runner.log").read_text(errors="replace").strip().splitlines()
    why = f"its runner did not begin: {said[-1] if said else runner.returncode}"
    folder.end(Ending("not_started", None, why))
    return why


def _folder(work_dir: Path, key: AttemptKey) -> AttemptFolder:
    return AttemptFolder(work_dir / "attempts" / key.folder)


def _orders_line() -> bytes:
    """Return the orders, b"" where the controller has left or is late."""
    ready, _, _ = select.select([sys.stdin.buffer], [], [], 2 * ORDERS_S)
    return sys.stdin.buffer.readline() if ready else b""


def _say(message: Observation | Outcome) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
