"""A stand-in for training on a VM of the fleet's bed: it notes when it ran and on what, and who ran beside it.

`fleet_job.py FOLDER grpo --model=SECONDS[:CODE]… …`. A lock of the kernel's for each GPU, and one for the job, prove
that nobody else held them: what finds one taken writes FOLDER/violations.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def main() -> int:
    folder = Path(sys.argv[1])
    options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[3:])
    attempt = Path(os.environ["HPC_GRPO_FLEET_ATTEMPT"]).name
    job = attempt.rpartition(".")[0]
    number = int(attempt.rpartition(".")[2])
    host = socket.gethostname()
    gpus = [f"{host}-{index}" for index in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    for name in (*gpus, job):
        lock = os.open(folder / f"lock-{name}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (folder / "violations").open("a") as file:
                file.write(f"{attempt} found {name} taken\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    note = {"job": job, "attempt": number, "gpus": gpus, "argv": sys.argv[2:], "began": uptime()}
    path = folder / f"ran-{attempt}.json"
    seconds, *codes = options["model"].split(":")
    print(f"{attempt} on {' '.join(gpus)}", flush=True)
    code = int(codes[min(number, len(codes)) - 1]) if codes else 0
    try:
        ends = uptime() + float(seconds)
        while uptime() < ends:
            path.write_text(json.dumps({**note, "ended": uptime()}))
            time.sleep(0.1)
    finally:
        path.write_text(json.dumps({**note, "ended": uptime()}))
    if code == 1:
        print("Traceback (most recent call last):\n  File x\nRuntimeError: CUDA out of memory", flush=True)
    return code


def uptime() -> float:
    """Return seconds since boot: one clock on all machines of a bed."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    sys.exit(main())
