"""A template: a process that imports an actor's modules before Ray asks for the actor. The actor is then a fork of it.

`python -m hpc_grpo.template.server PARENT SOCKET KIND RUN_DIR` is started on each node beside Ray, once for each kind
of actor, in this kind's environment, because libraries read variables during import. The imports run while Ray starts.
They run once per node for any number of actors, and not again for the actors of a restarted driver.

Ray starts such a worker by `client.py`, which sends Ray's arguments to the template and ends. Templates are optional:
without one, or if it refuses, the client becomes a Python that imports for itself. A template refuses a worker with
another environment. It does not serve with threads or an open /dev/nvidia*: neither survives a fork. Imports of torch
and DeepSpeed open NVML, so the template closes NVML after them.
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
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.data.tokenizer import hasten_transformers
from hpc_grpo.run.evals import REQUEST
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import tie_to_parent
from hpc_grpo.system.say import say
from hpc_grpo.template.client import FORKED, SIZE
from hpc_grpo.template.environment import prepare

_IGNORED_PREFIX, _IGNORED = "RAY_", ("SPT_NOENV", "PWD", "OLDPWD", "SHLVL", "_")
"""Variables to ignore when two environments are compared: of Ray, and of the shell that starts a worker."""

_GPU_DEVICES = "/dev/nvidia"
_NUM_DESCRIPTORS = 3
_NICE = 10
_THREAD_ENDS_S = 10.0


def why_not_forked(process: Path = Path("/proc/self")) -> str:
    """Return why this process must not be forked; "" if it may be."""
    if len(list((process / "task").iterdir())) > 1:
        return "an import has started threads"
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if str(target := descriptor.readlink()).startswith(_GPU_DEVICES):
                return f"an import has opened {target}"
    return ""


def differing(own: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of variables whose values differ between a template and a worker.

    >>> differing({"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1"}, {"OMP_NUM_THREADS": "2", "RAY_JOB_ID": "2"})
    ['OMP_NUM_THREADS']
    """
    names = {name for name in {*own, *theirs} if own.get(name) != theirs.get(name)}
    return sorted(name for name in names if not name.startswith(_IGNORED_PREFIX) and name not in _IGNORED)


def import_behind(modules: Sequence[str]) -> None:
    """Lower this thread's priority and import the modules. A module that cannot be imported is skipped with a message.

    At normal priority, Ray's start took 41 s instead of 9 s on two cores. Run this in a thread: a process with lowered
    priority, and its forks, could not raise it again. Ray is not imported: each worker has its own settings, which Ray
    reads at import.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    sys.modules["ray"] = None  # type: ignore[assignment]  # the import fails, and vLLM works without Ray
    hasten_transformers()
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the actor, which needs the module, reports it
            say(f"{module} is not imported: {error}")
    del sys.modules["ray"]


def close_nvml() -> bool:
    """Close NVML, however often imports have opened it; return whether it was open.

    NVML counts its users in the process: each `nvmlInit` needs an `nvmlShutdown` before the devices are closed.
    """
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()  # torch loads NVML by ctypes; pynvml can shut down only after it has loaded NVML itself
    except pynvml.NVMLError:
        return False
    num_users = -1
    with contextlib.suppress(pynvml.NVMLError):  # raised when nobody uses NVML any more
        while True:
            pynvml.nvmlShutdown()
            num_users += 1
    return num_users > 0


def serve(listener: socket.socket, own: Mapping[str, str]) -> tuple[dict[str, Any], list[int]]:
    """Fork for each requested worker. Returns only in the fork, with the request and its descriptors.

    A request has `words` (the arguments of `python`), `environ` and the folder `cwd`.
    """
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                worker, descriptors = _receive(connection)
                poll = select.poll()
                poll.register(connection, 0)  # the kernel always reports a hang-up
                if poll.poll(0):
                    say("A worker was not forked: Ray gave up on it while this template was importing.")
                elif names := differing(own, worker["environ"]):
                    say(f"A worker imports for itself: its {', '.join(names)} differs from this template's.")
                elif os.fork() == 0:
                    listener.close()
                    return worker, descriptors
                else:
                    connection.sendall(FORKED)
            except (OSError, ValueError) as error:
                say(f"A worker was not forked: {error}")
                continue
        for descriptor in descriptors:
            os.close(descriptor)


def become(worker: Mapping[str, Any], descriptors: Sequence[int], added: Mapping[str, str]) -> None:
    """Continue as the requested worker. `added` are the variables that imports have set."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update({**worker["environ"], **added})
    os.chdir(worker["cwd"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # otherwise all workers of one template would draw the same numbers
    program, *_ = sys.argv = worker["words"]
    sys.path[0] = str(Path(program).parent)  # as in a Python that is started with a file
    runpy.run_path(program, run_name="__main__")


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, SIZE.size, _NUM_DESCRIPTORS)
    (size,) = SIZE.unpack(head)
    with connection.makefile("rb") as stream:
        text = stream.read(size)
    if len(text) < size:
        raise ValueError("the client ended before it had sent its request")
    return json.loads(text), descriptors


def is_needed(kind: str, config: Config, run: RunDir) -> bool:
    """Return whether the run starts actors of this kind. An eval starts no learner, and some tasks no engine."""
    return config.needs.rollouts if kind == "engine" else not (run.path / REQUEST).is_file()


def main(path: Path, modules: Sequence[str]) -> None:
    """Import the modules and serve as a template at the socket `path`. A fork continues as the requested worker.

    If this process must not be forked, removes the socket and returns.
    """
    own = dict(os.environ)
    listener = socket.socket(socket.AF_UNIX)
    unheard = path.with_suffix(".new")
    unheard.unlink(missing_ok=True)  # the socket of an earlier start of Ray
    listener.bind(str(unheard))
    listener.listen()  # a worker requested during the imports waits: this is faster than importing for itself
    unheard.rename(path)
    importing = threading.Thread(target=import_behind, args=(modules,))
    importing.start()
    importing.join()
    deadline = time.monotonic() + _THREAD_ENDS_S  # the kernel removes a thread a moment after Python has joined it
    while Path(f"/proc/self/task/{importing.native_id}").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    needs_nvml = close_nvml()
    if why := why_not_forked():
        say(f"This template does not serve: {why}.")
        path.unlink()
        return
    gc.freeze()  # pages that the collector does not touch stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes of forks are not read
    added = {name: value for name, value in os.environ.items() if own.get(name) != value}
    worker, descriptors = serve(listener, own)
    if needs_nvml:
        import pynvml

        pynvml.nvmlInit()
    become(worker, descriptors, added)


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]), signal.SIGTERM)
    actor_kind, run = sys.argv[3], RunDir(Path(sys.argv[4]))
    run_config = read_config(run)
    if is_needed(actor_kind, run_config, run):
        main(Path(sys.argv[2]), prepare(actor_kind, run_config))
