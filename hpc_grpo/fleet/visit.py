"""The program of one visit, on a VM: `python -m hpc_grpo.fleet.visit`, a fixed command line; all data is on stdin.

It observes, reports, waits for orders, carries them out and ends (messages.py). The jobs' runners continue. A job's row
reaches this machine as JSON, and the job's program as argv: no shell reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpc_grpo.fleet.attempt_folder import AttemptFolder, marked_processes, prune, uptime
from hpc_grpo.fleet.messages import (
    ORDERS_S,
    PROTOCOL,
    AttemptKey,
    AttemptSeen,
    GpuSeen,
    Observation,
    Orders,
    Outcome,
    Request,
    decode_orders,
    encode,
)
from hpc_grpo.fleet.states import Ending
from hpc_grpo.system.commands import run_command

_LOG_BYTES = 1 << 20
_BEGIN_S = 10.0
_NVIDIA_SMI_S = 7.0
"""Twice this is less than `visit_s`: if nvidia-smi hangs on a VM, its jobs must not end for lack of visits."""


def main() -> None:
    """Run one visit over stdin and stdout. Obeys no order if the controller leaves before its line is complete."""
    request = Request(**json.loads(sys.stdin.buffer.readline()))
    if request.protocol != PROTOCOL:
        problem = f"this VM's hpc-grpo speaks protocol {PROTOCOL}, the controller {request.protocol}"
        _say(Observation((), (), problem))
        return
    work_dir = Path.home() / Path(request.work_dir).expanduser()
    observation = observe(work_dir, request)
    seen_at = uptime()  # a slow nvidia-smi uses up none of the time for orders
    _say(observation)
    if not (line := _orders_line()):
        return
    if (took_s := uptime() - seen_at) > ORDERS_S:
        problem = f"the orders came {took_s:.0f} s after the observation, later than {ORDERS_S:.0f} s"
        _say(Outcome((), (), (), problem))
        return
    _say(obey(work_dir, decode_orders(line), seen_at))


def observe(work_dir: Path, request: Request) -> Observation:
    """Return the GPUs and the attempts of this machine."""
    work_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    gpus, problem = _read_gpus(request.nvidia_smi)
    attempts = []
    paths = sorted(path for path in (work_dir / "attempts").glob("*") if path.is_dir())
    for path in paths:
        with contextlib.suppress(OSError):  # another visit has moved it away, or the disk is full
            if (seen := _seen(AttemptFolder(path), request, len(paths))) is not None:
                attempts.append(seen)
    return Observation(gpus, tuple(attempts), problem)


def _read_gpus(command: str) -> tuple[tuple[GpuSeen, ...], str]:
    """Return the GPUs that nvidia-smi lists, and its error, "" for none."""
    answers = []
    for query in ("--query-gpu=index,uuid,memory.total,memory.used", "--query-compute-apps=gpu_uuid,pid"):
        answer = run_command([command, query, "--format=csv,noheader,nounits"], _NVIDIA_SMI_S)
        if answer.error:
            return (), answer.error
        answers.append([line.split(", ") for line in answer.text.splitlines() if line.strip()])
    listed, apps = answers
    owners = [row[0] for row in apps]
    try:
        return tuple(
            GpuSeen(int(i), uuid, _mib(total), _mib(used), owners.count(uuid)) for i, uuid, total, used in listed
        ), ""
    except ValueError:
        return (), f"{command} printed no list of GPUs: {str(listed)[:200]}"


def _mib(cell: str) -> int:
    """Return a size that nvidia-smi prints. Integrated GPUs have none: [N/A]."""
    return int(cell) if cell.isdigit() else 0


def _seen(folder: AttemptFolder, request: Request, num_attempts: int) -> AttemptSeen | None:
    key, spec = folder.key(), folder.spec()
    # No key: another visit is creating the folder, or was killed while doing that; `_revoke` settles it.
    if key is None or not folder.is_of_this_machine():
        return None
    lives = folder.runner_lives()
    ended = folder.ending()
    if ended is None and not lives:
        ended = folder.ending() or _end_of_dead_runner(folder, spec)
    log, size = b"", 0
    if request.with_logs and folder.log.exists():
        with folder.log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(request.log_offsets.get(key.folder, 0))
            log = file.read(16 * _LOG_BYTES // max(16, num_attempts))  # an answer has a limit
    return AttemptSeen(key, tuple(spec["gpus"]) if spec else (), ended, size, log)


def _end_of_dead_runner(folder: AttemptFolder, spec: dict[str, Any] | None) -> Ending | None:
    """Write and return the end of an attempt whose runner was killed; None while processes of its job are left.

    The kernel has sent SIGTERM to the job's first process. After `end_s`, this visit kills the rest.
    """
    if not folder.runner.exists() and time.time() - folder.path.stat().st_mtime < 2 * _BEGIN_S:
        return None  # the runner is being started
    if pids := marked_processes(folder.path):
        died = folder.path / "runner_died"
        if not died.exists():
            died.touch()
        if spec is None or time.time() - died.stat().st_mtime > float(spec["end_s"]):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return None
    began = folder.runner.exists()
    ending = Ending("exit", None, "its runner died: the VM was restarted, or somebody killed the runner")
    ending = ending if began else Ending("not_started", None, "its runner did not begin")
    folder.end(ending)
    if not began and folder.runner.exists():  # the runner began just now
        folder.retract()
        return None
    return ending


def obey(work_dir: Path, orders: Orders, seen_at: float) -> Outcome:
    """Carry out a controller's committed orders. A lease starts at `seen_at`, when this visit observed the machine."""

    def folder_of(key: AttemptKey) -> AttemptFolder:
        return AttemptFolder(work_dir / "attempts" / key.folder)

    for key in orders.renew:
        if (folder := folder_of(key)).path.is_dir():
            folder.renew(seen_at)
    for key in orders.cancel:
        if (folder := folder_of(key)).path.is_dir():
            folder.cancel()
    revoked = tuple(key for key in orders.revoke if _revoke(folder_of(key), key))
    for key in orders.forget:
        if (folder := folder_of(key)).ending() is not None:
            (work_dir / "over").mkdir(exist_ok=True, mode=0o700)
            folder.log.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another visit was first
                folder.path.replace(work_dir / "over" / key.folder)
    if orders.forget:
        prune(work_dir / "over")
    begun: dict[AttemptKey, subprocess.Popen[bytes]] = {}
    failed: list[tuple[AttemptKey, str]] = []
    for spec in orders.start:
        key = AttemptKey(spec["job_id"], spec["attempt"])
        if (runner := _begin(folder_of(key), key, spec, seen_at)) is None:
            failed.append((key, "this attempt was started or revoked before"))
        else:
            begun[key] = runner
    deadline = time.monotonic() + _BEGIN_S
    failed += [(key, why) for key, one in begun.items() if (why := _why_not_begun(folder_of(key), one, deadline))]
    return Outcome(tuple(sorted(begun.keys() - {key for key, _ in failed})), revoked, tuple(failed), "")


def _revoke(folder: AttemptFolder, key: AttemptKey) -> bool:
    """Decide that an attempt never starts here. Return False if it began: it may still run, or has an exit to report.

    A runner whose folder was deleted ends its job, which may take `end_s`; the attempt has not ended before that. A
    renamed machine recognizes none of its attempts: their leases run out.
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


def _begin(
    folder: AttemptFolder, key: AttemptKey, spec: dict[str, Any], seen_at: float
) -> subprocess.Popen[bytes] | None:
    """Start a runner. Return None if the attempt began before, or was revoked."""
    if (folder.path.parents[1] / "over" / key.folder).exists() or not folder.make():
        return None
    folder.write_spec(spec)
    folder.renew(seen_at)
    folder.write_key(key)
    argv = [sys.executable, "-m", "hpc_grpo.fleet.runner", str(folder.path)]
    with (folder.path / "runner.log").open("wb") as log:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _why_not_begun(folder: AttemptFolder, runner: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for a runner's record. Return why there is none; "" if there is one, or the runner still starts."""
    while not folder.runner.exists() and runner.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if folder.runner.exists() or runner.poll() is None:
        return ""
    said = (folder.path / "runner.log").read_text(errors="replace").strip().splitlines()
    why = f"its runner did not begin: {said[-1] if said else runner.returncode}"
    folder.end(Ending("not_started", None, why))
    return why


def _orders_line() -> bytes:
    """Return the line with the orders; b"" if the controller has left or is late."""
    ready, _, _ = select.select([sys.stdin.buffer], [], [], 2 * ORDERS_S)
    return sys.stdin.buffer.readline() if ready else b""


def _say(message: Observation | Outcome) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
