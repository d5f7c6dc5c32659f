"""The program that runs a job inside a sandbox: `python -I -S -c INSIDE`, a JSON job on stdin, its results on stdout.

A job has `argv`, `files` to write into the folder it starts in (name -> text), `cases` (each the text on stdin) and
`limits`. The answer has, for each case that was run, how it ended and what it wrote; the first that does not end well
is the last one where `stop_early` says so. It watches what the programs take together: limits of the kernel's are for
one process each.

The first process of its namespace: what it leaves behind dies with it. Where there is no namespace it adopts and kills
what its programs started, as well as that can be done. It imports the standard library alone, and holds no secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S, _POLL_NODE_S = 0.02, 0.2
"""Between two looks at the processes: those of the namespace, or without one those of the whole node."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ANSWER_FD_ENVIRONMENT = "VERDICT_FD"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""OpenBLAS and MKL take it too: with a thread for each core of a large node, NumPy's import would pass the limits."""
_KILL_S, _KILL_POLL_S = 5.0, 0.0005
"""On a busy node a killed process takes a while to go."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


def main() -> None:
    job = json.load(sys.stdin)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # its programs run as the same user: they must not trace this one
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace gets no signal without a handler
    results = []
    for stdin in job["cases"]:
        try:
            _write_files(job["files"])
            results.append(_run(job["argv"], stdin, job["limits"]))
        except OSError as error:
            if not results:
                raise
            # What a program left behind is in the way: its own fault, and no way around a score.
            results.append({"ended": f"leftovers: {error}"})
            break
        if not _kill_all():
            results[-1]["ended"] = "processes that cannot be killed"
            break
        if job["stop_early"] and results[-1]["ended"] != "exit 0":
            break
    print(json.dumps(results), flush=True)
    os._exit(0)


def _write_files(files: dict[str, str]) -> None:
    """Empty the folder of what the case before has left, and write the job's files."""
    for entry in Path().iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")


def _run(argv: list[str], stdin: str, limits: dict[str, float]) -> dict[str, str]:
    """Run one case; return how it ended (`exit N`, `signal N`, `time`, `memory`, `processes`, `output`) and outputs."""
    verdict, theirs = os.pipe()
    process: Any = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[theirs],
        env={**os.environ, **_ONE_THREAD, _ANSWER_FD_ENVIRONMENT: str(theirs)},
        preexec_fn=lambda: _limit(limits),
    )
    os.close(theirs)
    written = {"stdout": bytearray(), "stderr": bytearray(), "verdict": bytearray()}
    with selectors.DefaultSelector() as selector:
        for name, descriptor in (("stdout", process.stdout), ("stderr", process.stderr), ("verdict", verdict)):
            selector.register(descriptor, selectors.EVENT_READ, name)
        pending = memoryview(stdin.encode("utf-8", "surrogatepass"))
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        ended = _watch(process, selector, pending, written, limits)
    os.close(verdict)
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            stream.close()
    kept = int(limits["output_bytes"])
    return {"ended": ended, **{name: data[:kept].decode("utf-8", "replace") for name, data in written.items()}}


def _limit(limits: dict[str, float]) -> None:
    """Set the kernel's limits for each process, and let the watching one go first."""
    cpu, memory = int(limits["cpu_s"]), int(limits["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limits["file_bytes"]),) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (int(limits["kernel_processes"]),) * 2)
    os.nice(5)


def _watch(process: Any, selector: Any, pending: Any, written: dict[str, bytearray], limits: dict[str, float]) -> str:
    """Feed and read the program until it ends or passes a limit; look at what it takes every 20 ms."""
    deadline, next_look = time.monotonic() + limits["wall_s"], 0.0
    while True:
        for key, _ in selector.select(_POLL_S):
            if key.data == "stdin":
                pending = _feed(process, selector, pending)
            else:
                _read(key, selector, written)
        if sum(map(len, written.values())) > limits["output_bytes"]:
            return "output"
        now = time.monotonic()
        if now >= next_look:
            next_look = now + (_POLL_S if os.getpid() == 1 else _POLL_NODE_S)
            num_processes, memory_bytes = _taken()
            if num_processes > limits["processes"]:
                return "processes"
            if memory_bytes > limits["memory_bytes"]:
                return "memory"
        if now > deadline:
            return "time"
        if process.poll() is not None:
            _drain(selector, written, limits["output_bytes"])
            code = process.returncode
            if code == -signal.SIGXCPU:
                return "time"
            return f"exit {code}" if code >= 0 else f"signal {-code}"


def _drain(selector: Any, written: dict[str, bytearray], most: float) -> None:
    """Read what an ended program has left in its pipes."""
    while ready := [key for key, _ in selector.select(0) if key.data != "stdin"]:
        for key in ready:
            _read(key, selector, written)
        if sum(map(len, written.values())) > most:
            return


def _feed(process: Any, selector: Any, pending: Any) -> Any:
    try:
        pending = pending[os.write(process.stdin.fileno(), pending[:65536]) :] if pending else pending
    except BlockingIOError:
        return pending
    except OSError:  # it does not read its input
        pending = pending[:0]
    if not pending:
        selector.unregister(process.stdin)
        with contextlib.suppress(OSError):
            process.stdin.close()
    return pending


def _read(key: Any, selector: Any, written: dict[str, bytearray]) -> None:
    data = os.read(key.fd, 65536)
    if data:
        written[key.data] += data
    else:
        selector.unregister(key.fileobj)


def _taken() -> tuple[int, int]:
    """Return how many processes there are besides this one, and what they hold in memory together."""
    others, pages = _others(), 0
    for pid in others:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(others), pages * _PAGE_BYTES


def _others() -> list[int]:
    """List the processes of the sandbox besides this one: all there are, or in no namespace this one's descendants."""
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
    """Kill and reap what is left; False where it multiplies faster, which the end of this process then ends."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        others = _others()
        for pid in [-1] if os.getpid() == 1 and others else others:  # -1: all of the namespace at once, forks included
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
