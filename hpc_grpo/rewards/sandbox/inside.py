"""The first process of a sandbox: `python -I -S inside.py`. It reads jobs, a JSON line each, and writes a line with
the results of each job.

A job has `cases` (texts), `limits`, `files` to write into its start folder, and a program:
- `argv`, a program. Each case is the text on the program's stdin.
- `scorer`, a function as `module:name`. It gets `given`, and returns a function that scores a case. This process
  imports the module and calls the function once. Each case is scored in a fork of this process, and so starts at once.

The answer has the job's `id` and, for each run case, how it ended and what it wrote. No case runs after one that does
not end with `exit 0`. With `patience_s`, only a case that exceeds a limit or is killed after this many seconds is the
last one. This process never runs a model's text, and no case can reach this process.

The kernel limits the memory of single processes, so this process watches the sum of all. Without a namespace, this
process kills its descendants. It imports only the standard library, and holds no secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import re
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_S, _POLL_NODE_S = 0.02, 0.2
"""Seconds between two checks of the namespace's processes; without a namespace, of the node's processes."""

_POLL_ENDING_S = 0.001
"""Seconds between two checks of a program that has closed its pipes: it is about to end."""

_MEMORY = re.compile(rb"^Vm(Size|RSS|Swap|PTE):\s+(\d+) kB$", re.MULTILINE)
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Read by OpenBLAS and MKL too. With a thread for each core of a large node, NumPy's import would exceed the limits."""
_DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2, "verdict": 3}
_KILL_S, _KILL_POLL_S = 5.0, 0.0005
"""Seconds to wait for killed processes, and between two checks: on a busy node they take a while to end."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main() -> None:
    sys.path.append(str(Path(__file__).parent))
    importlib.import_module("syscalls").refuse_calls()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # Its programs run as the same user, and must not trace this process.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Without a namespace, nothing else ends it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace gets no signal without a handler
    os.environ.update(_ONE_THREAD)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # output of an imported scorer is no answer
        for line in sys.stdin.buffer:
            job = json.loads(line)
            answers.write(json.dumps({"id": job["id"], "results": _run_cases(job)}).encode() + b"\n")
            answers.flush()
    os._exit(0)


def _run_cases(job: dict[str, Any]) -> list[dict[str, str]]:
    results: list[dict[str, str]] = []
    begun, patience_s = time.monotonic(), job["patience_s"]
    for case in job["cases"]:
        _empty_folder()
        for name, text in job["files"].items():
            Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
        results.append(_run(job, case))
        if not _kill_all():
            results[-1]["ended"] = "processes that cannot be killed"
            break
        how, taken_s = results[-1]["ended"].split()[0], time.monotonic() - begun
        if results[-1]["ended"] != "exit 0" if patience_s is None else how != "exit" and taken_s > patience_s:
            break
    _empty_folder()
    return results


def _empty_folder() -> None:
    """Remove the files of a case. Folders may be nested too deep for Python's recursion or for a single path."""
    Path.cwd().chmod(0o700)  # A case may have removed the permission that a path through "." needs.
    pending, moved = [Path()], 0
    while pending:
        folder = pending.pop()
        for entry in folder.iterdir():
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
            elif not entry.is_mount():  # a shown folder may lie below /tmp
                entry.chmod(0o700)
                if folder != Path():
                    while os.path.lexists(str(moved)):
                        moved += 1
                    entry = entry.rename(str(moved))
                pending.append(entry)
        if folder != Path():
            folder.rmdir()


def _run(job: dict[str, Any], case: str) -> dict[str, str]:
    """Run a case. Return how it ended (`exit N`, `signal N`, `time`, `memory`, `processes`, `output`) and its outputs.

    `refused` means that a scorer raised ValueError for its `given`; stderr then holds the error.
    """
    limits, score, address_bytes = dict(job["limits"]), None, job["limits"]["memory_bytes"]
    if "scorer" in job:
        try:
            sys.path += [path for path in job["path"] if path not in sys.path]
            score = _made(job["scorer"], json.dumps(job["given"]))  # before a fork sees a model's text
        except ValueError as error:
            return {"ended": "refused", "stdout": "", "stderr": str(error), "verdict": ""}
        own_address_bytes, own_bytes = _memory_bytes("self")
        address_bytes += own_address_bytes  # a fork starts with what this process has imported
        limits["memory_bytes"] += own_bytes
    pipes = {name: os.pipe() for name in _DESCRIPTORS}
    theirs = {name: ends[name != "stdin"] for name, ends in pipes.items()}
    ours = {name: ends[name == "stdin"] for name, ends in pipes.items()}
    if (process := os.fork()) == 0:
        try:
            _take_descriptors(theirs)
            _limit(limits, address_bytes)
            if score is None:
                os.execv(job["argv"][0], job["argv"])
            os.write(_DESCRIPTORS["verdict"], repr(float(score(case))).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a scorer may raise anything
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)  # never return into the parent's loop
    for descriptor in theirs.values():
        os.close(descriptor)
    written = {name: bytearray() for name in _DESCRIPTORS if name != "stdin"}
    os.set_blocking(ours["stdin"], False)
    with selectors.DefaultSelector() as selector:
        for name in written:
            selector.register(ours[name], selectors.EVENT_READ, name)
        selector.register(ours["stdin"], selectors.EVENT_WRITE, "stdin")
        pending = memoryview(b"" if score else case.encode("utf-8", "surrogatepass"))
        ended = _watch(process, selector, pending, written, limits)
        for key in list(selector.get_map().values()):
            os.close(key.fd)
    kept = int(limits["output_bytes"])
    return {"ended": ended, **{name: data[:kept].decode("utf-8", "replace") for name, data in written.items()}}


@functools.lru_cache(64)
def _made(scorer: str, given: str) -> Callable[[str], float]:
    module, _, name = scorer.partition(":")
    made: Callable[[str], float] = getattr(importlib.import_module(module), name)(**json.loads(given))
    return made


def _take_descriptors(theirs: dict[str, int]) -> None:
    """Keep only the case's pipes: the parent's other descriptors carry the results of cases."""
    above = {name: fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for name, descriptor in theirs.items()}
    for name, descriptor in above.items():
        os.dup2(descriptor, _DESCRIPTORS[name])
    os.closerange(len(_DESCRIPTORS), 1024)


def _limit(limits: dict[str, float], address_bytes: float) -> None:
    """Set the kernel's limits of this process, and a lower priority than that of the watching process."""
    for name, most in {
        "CPU": limits["cpu_s"],
        "AS": address_bytes,
        "FSIZE": limits["file_bytes"],
        "NPROC": limits["kernel_processes"],
        "NOFILE": 256,
        "SIGPENDING": 256,
        "CORE": 0,
    }.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(most), int(most)))
    os.nice(5)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(process: int, selector: Any, pending: Any, written: dict[str, bytearray], limits: dict[str, float]) -> str:
    """Feed and read the program until it ends or exceeds a limit. Return how it ended, as in `_run`."""
    deadline, next_look = time.monotonic() + limits["wall_s"], 0.0
    while True:
        for key, _ in selector.select(_POLL_S if selector.get_map() else _POLL_ENDING_S):
            if key.data == "stdin":
                pending = _feed(key.fd, selector, pending)
            else:
                _read(key, selector, written)
        if sum(map(len, written.values())) > limits["output_bytes"]:
            return "output"
        now = time.monotonic()
        if now >= next_look:
            next_look = now + (_POLL_S if os.getpid() == 1 else _POLL_NODE_S)
            num_processes, memory_bytes = _taken(limits)
            if num_processes > limits["processes"]:
                return "processes"
            if memory_bytes > limits["memory_bytes"]:
                return "memory"
        if now > deadline:
            return "time"
        ended, status, used = os.wait4(process, os.WNOHANG)
        if ended:
            _drain(selector, written, limits["output_bytes"])
            code = os.waitstatus_to_exitcode(status)
            # RLIMIT_CPU counts whole ticks: on shared cores, more time than the process is said to have used.
            if code == -signal.SIGKILL and used.ru_utime + used.ru_stime > 0.5 * limits["cpu_s"]:
                return "time"
            return f"exit {code}" if code >= 0 else f"signal {-code}"


def _drain(selector: Any, written: dict[str, bytearray], most: float) -> None:
    """Read the rest of an ended program's pipes."""
    while ready := [key for key, _ in selector.select(0) if key.data != "stdin"]:
        for key in ready:
            _read(key, selector, written)
        if sum(map(len, written.values())) > most:
            return


def _feed(descriptor: int, selector: Any, pending: Any) -> Any:
    try:
        pending = pending[os.write(descriptor, pending[:65536]) :] if pending else pending
    except BlockingIOError:
        return pending
    except OSError:  # the program does not read its input
        pending = pending[:0]
    if not pending:
        selector.unregister(descriptor)
        os.close(descriptor)
    return pending


def _read(key: Any, selector: Any, written: dict[str, bytearray]) -> None:
    data = os.read(key.fd, 65536)
    if data:
        written[key.data] += data
    else:
        selector.unregister(key.fd)
        os.close(key.fd)


def _taken(limits: dict[str, float]) -> tuple[int, float]:
    """Return the number of processes besides this one, and their memory.

    A socket counts with its full buffer size, because the kernel does not report the used part.
    """
    others, taken = _others(), 0.0
    for pid in others:
        with contextlib.suppress(OSError):
            taken += _memory_bytes(pid)[1]
    if os.getpid() == 1:
        taken += limits["socket_bytes"] * (Path("/proc/self/net/unix").read_bytes().count(b"\n") - 1)
    return len(others), taken


def _memory_bytes(pid: int | str) -> tuple[int, int]:
    """Return the size of a process's address space, and its memory: resident, in swap, page tables.

    Page tables count nowhere else, and a process can have gigabytes of them for empty pages. If its first thread has
    ended, only the other threads show its memory.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found = {name: int(kib) << 10 for name, kib in _MEMORY.findall((thread / "status").read_bytes())}
        if found:
            return found.pop(b"Size"), sum(found.values())
    return 0, 0


def _others() -> list[int]:
    """List the other processes of the sandbox: all in the namespace, or without one the descendants of this process."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                # Bytes: a program may give itself a name that is no text.
                parents[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
    if os.getpid() == 1:
        return list(parents)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found - {os.getpid()})


def _kill_all() -> bool:
    """Kill and reap the other processes. Return False if new ones start too fast; they end with this process."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        others = _others()
        for pid in [-1] if os.getpid() == 1 and others else others:  # -1: the whole namespace at once, forks included
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not others:
            return True
        time.sleep(_KILL_POLL_S)
    return False


if __name__ == "__main__":
    main()
