"""A template: a process that imports what an actor needs before Ray asks for the actor, which is then a fork of it.

`python -m hpc_grpo.driver.template PARENT SOCKET KIND RUN_DIR`, started on each node beside Ray, one for each kind of
actor, in that kind's environment: libraries read variables while they are imported. Imports then go on while Ray comes
up, happen once a node however many actors it has, and not at all for those of a driver that is started again.

Ray starts a worker by a command; that of an actor with a template is `run/template_client.py`, which sends what Ray
told it and ends. Nothing depends on a template: where there is none, or it refuses, the client becomes a Python that
imports for itself. A template refuses a worker whose environment is another than its own, and does not serve where it
has threads or has opened a GPU: neither survives a fork. Imports of torch and DeepSpeed open NVML, so the template
closes NVML after them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.driver.processes import prepare
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.template_client import FORKED, SIZE
from hpc_grpo.system.processes import tie_to_parent
from hpc_grpo.system.say import say

_OF_EACH_WORKER = ("RAY_", "SPT_NOENV", "PWD", "OLDPWD", "SHLVL", "_")
"""Beginnings of variables that no import reads, and that differ: Ray's own, and those of the shell it starts by."""

_GPU_DEVICES = "/dev/nvidia"
_NUM_DESCRIPTORS = 3
_NICE = 10
_THREAD_ENDS_S = 10.0


@dataclass(frozen=True)
class Asked:
    """A worker as Ray has it started: the words of `python ...`, its variables and its current folder."""

    words: list[str]
    environ: dict[str, str]
    cwd: str


def why_not_forked(process: Path = Path("/proc/self")) -> str:
    """Return why this process must not be forked; "" if it may be."""
    if len(list((process / "task").iterdir())) > 1:
        return "an import has started threads"
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if str(target := descriptor.readlink()).startswith(_GPU_DEVICES):
                return f"an import has opened {target}"
    return ""


def differing(own: Mapping[str, str], asked: Mapping[str, str]) -> list[str]:
    """Return the variables in which a worker's environment is another than a template's, by name.

    >>> differing({"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1"}, {"OMP_NUM_THREADS": "2", "RAY_JOB_ID": "2"})
    ['OMP_NUM_THREADS']
    """
    names = {name for name in {*own, *asked} if own.get(name) != asked.get(name)}
    return sorted(name for name in names if not name.startswith(_OF_EACH_WORKER[0]) and name not in _OF_EACH_WORKER)


def import_all(modules: Sequence[str]) -> None:
    """Import what can be; without Ray, which takes its settings when it is loaded: they are those of each worker."""
    sys.modules["ray"] = None  # type: ignore[assignment]  # the import fails, and vLLM goes on without
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:  # the actor, which needs it, says so to the user
            say(f"{module} is not imported: {error}")
    del sys.modules["ray"]


def import_behind(modules: Sequence[str]) -> None:
    """Import in a thread that gives way to Ray's start: on two cores Ray was up after 41 s instead of 9 otherwise.

    In a thread, as a process could not take its priority back, nor could its forks.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    import_all(modules)


def close_nvml() -> bool:
    """Close NVML, however often imports have opened it; return whether they had.

    NVML counts its users in the process: each `nvmlInit` needs an `nvmlShutdown` before the devices are closed.
    """
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()  # torch loads NVML by ctypes, and pynvml shuts down nothing before it has loaded NVML itself
    except pynvml.NVMLError:
        return False
    num_users = -1
    with contextlib.suppress(pynvml.NVMLError):  # raised once nobody uses NVML any more
        while True:
            pynvml.nvmlShutdown()
            num_users += 1
    return num_users > 0


def _wait_for_end(thread: threading.Thread) -> None:
    """Wait until the kernel has no more of a thread that Python has joined."""
    ended = Path(f"/proc/self/task/{thread.native_id}")
    deadline = time.monotonic() + _THREAD_ENDS_S
    while ended.exists() and time.monotonic() < deadline:
        time.sleep(0.001)


def serve(listener: socket.socket, own: Mapping[str, str]) -> tuple[Asked, list[int]]:
    """Fork for each worker that is asked for; returns in the fork alone, with what was asked and its descriptors."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                asked, descriptors = _receive(connection)
                if _has_ended(connection):
                    say("A worker was not forked: Ray gave it up while this template imported.")
                elif names := differing(own, asked.environ):
                    say(f"A worker has another {', '.join(names)} than this template: it imports for itself.")
                elif os.fork() == 0:
                    listener.close()
                    return asked, descriptors
                else:
                    connection.sendall(FORKED)
            except (OSError, ValueError) as error:
                say(f"A worker was not forked: {error}")
                continue
        for descriptor in descriptors:
            os.close(descriptor)


def become(asked: Asked, descriptors: Sequence[int], added: Mapping[str, str]) -> None:
    """Go on as the worker that was asked for; `added` are the variables that imports have set."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update({**asked.environ, **added})
    os.chdir(asked.cwd)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # of one template all workers would draw the same
    program, *_ = sys.argv = asked.words
    sys.path[0] = str(Path(program).parent)  # as Python has it that is started with a file
    runpy.run_path(program, run_name="__main__")


def _receive(connection: socket.socket) -> tuple[Asked, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, SIZE.size, _NUM_DESCRIPTORS)
    (size,) = SIZE.unpack(head)
    with connection.makefile("rb") as stream:
        text = stream.read(size)
    if len(text) < size:
        raise ValueError("it ended before it had said what it is to be")
    return Asked(**json.loads(text)), descriptors


def _has_ended(connection: socket.socket) -> bool:
    """Say whether the process at the other end is gone."""
    poll = select.poll()
    poll.register(connection, 0)  # of that the kernel tells unasked
    return bool(poll.poll(0))


def main(path: Path, modules: Sequence[str]) -> None:
    """Import the modules and be a template at `path`."""
    own = dict(os.environ)
    listener = socket.socket(socket.AF_UNIX)
    unheard = path.with_suffix(".new")
    unheard.unlink(missing_ok=True)  # that of a start of Ray before this one
    listener.bind(str(unheard))
    listener.listen()  # a worker that is asked for meanwhile waits, which costs it less than to import for itself
    unheard.rename(path)
    importing = threading.Thread(target=import_behind, args=(modules,))
    importing.start()
    importing.join()
    _wait_for_end(importing)
    needs_nvml = close_nvml()
    if why := why_not_forked():
        say(f"This template serves nobody: {why}.")
        path.unlink()
        return
    gc.freeze()  # pages that the collector does not touch stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for their exit codes
    added = {name: value for name, value in os.environ.items() if own.get(name) != value}
    asked, descriptors = serve(listener, own)
    if needs_nvml:
        import pynvml

        pynvml.nvmlInit()
    become(asked, descriptors, added)


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]), signal.SIGTERM)
    asked_kind, run_config = sys.argv[3], read_config(RunDir(Path(sys.argv[4])))
    if asked_kind == "learner" or run_config.needs.rollouts:
        main(Path(sys.argv[2]), prepare(asked_kind, run_config))
