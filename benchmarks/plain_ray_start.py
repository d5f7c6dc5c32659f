"""Two hosts brought up by plain `ray start` scripts, and by this project: lines to type, time, and a worker's loss.

As root, after `make machines-install`: `python benchmarks/plain_ray_start.py [--rounds N]`. It brings up two hosts
(network namespaces of this machine, see tools/virtual_machines) and on them, in turn: `ray start --head`, `ray start
--address` and a driver that steps through an actor on each node; `hpc-grpo place host head` and `worker`; `hpc-grpo
train` with `launch.hosts`. Ours have a driver that does the same and checkpoints every second step. After five steps
the worker's raylet is killed. Time is from the first line to both nodes in Ray, and from the kill to a further step; a
line is typed as soon as the one before it has returned.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from common import load_average, median, print_table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.places.scene import PROGRAMS, STEPPING, Command, Scene  # noqa: E402
from tools.virtual_machines import host, packages  # noqa: E402
from tools.virtual_machines.bed_layout import BedLayout, Shape  # noqa: E402
from tools.virtual_machines.beds import Bed  # noqa: E402

HEAD, WORKER, PORT = "host1", "host2", 6379
_DEADLINE_S = 240.0
_WATCH_S = 90.0
"""So long a further step is waited for after the kill."""
_ENDS_S = 60.0
# No token on any host, so plain Ray runs open to the network. With ~/.ray/auth_token on one of them alone, another
# host's raylet is refused ("InvalidAuthToken"), since Ray 2.60 takes a token that it finds: one more line to type.
_PLAIN = {"HOME": "/tmp", "RAY_AUTH_MODE": "disabled", "STEP_S": "0.5"}
_OURS = {"HPC_GRPO_STAND_IN_STEP_S": "0.5", "RAY_HEAD_PORT": "10001"}
_DRIVER = """
import os, sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.05)
print("ready", flush=True)
class Hand:
    def work(self):
        time.sleep(float(os.environ["STEP_S"]))
places = [f"node:{node['NodeManagerAddress']}" for node in nodes]
hands = [ray.remote(num_cpus=0.1)(Hand).options(resources={place: 0.01}).remote() for place in places]
step = 0
while True:
    ray.get([hand.work.remote() for hand in hands])
    step += 1
    print("step", step, flush=True)
"""


@dataclass
class Row:
    """What one way of bringing two hosts up did. `back_s`: from the kill to a further step, None for never."""

    lines: str
    ready_s: float
    back_s: float | None
    after: str
    left: set[str]


def wait_for(condition: Callable[[], bool], deadline_s: float = _DEADLINE_S) -> float | None:
    """Return the seconds until it holds; None where it never did."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > deadline_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - begun


def needed(seconds: float | None, what: str, *commands: Command) -> float:
    if seconds is None:
        raise SystemExit("\n".join([f"not {what} within {_DEADLINE_S:.0f} s", *(command.text for command in commands)]))
    return seconds


def kill_raylet(bed: Bed) -> None:
    (raylet,) = [pid for pid, words in bed.processes(WORKER).items() if "/raylet/raylet " in words]
    os.kill(raylet, signal.SIGKILL)


def things_on(bed: Bed) -> set[str]:
    """Return what the hosts have that idle ones have not, once processes that end have ended."""
    wait_for(lambda: not any(bed.residue(name).processes for name in bed.names), 10.0)
    found = {name: bed.residue(name) for name in bed.names}
    processes = {f"process {pid} of {name}" for name, each in found.items() for pid in each.processes}
    memory = {f"/dev/shm/{entry} of {name}" for name, each in found.items() for entry in each.shared_memory}
    return processes | memory | {f"/tmp/{entry} of {name}" for name, each in found.items() for entry in each.tmp}


def plain(bed: Bed, folder: Path) -> Row:
    """Run `ray start` on each, a driver, and `ray stop` on each, which sees its machine's PID space alone."""
    address, ray = f"{bed.address(HEAD)}:{PORT}", str(PROGRAMS / "ray")
    driver_file = folder / "plain_driver.py"
    driver_file.write_text(_DRIVER)

    def typed(machine: str, *words: str) -> Command:
        return Command(bed, machine, list(words), folder, _PLAIN)

    def steps() -> int:
        return driver.text.count("step ")

    before, begun = things_on(bed), time.monotonic()
    limits = ("--num-cpus=2", "--num-gpus=0", "--disable-usage-stats", "--object-store-memory=100000000")
    on_head = ("--head", f"--port={PORT}", f"--node-ip-address={bed.address(HEAD)}", "--include-dashboard=false")
    for machine, options in ((HEAD, on_head), (WORKER, (f"--address={address}",))):
        command = typed(machine, ray, "start", *options, *limits)
        if command.wait() != 0:
            raise SystemExit(command.text)
    driver = typed(HEAD, sys.executable, str(driver_file), address)
    needed(wait_for(lambda: "ready" in driver.text), "ready", driver)
    ready_s = time.monotonic() - begun
    needed(wait_for(lambda: steps() >= 5), "stepping", driver)
    kill_raylet(bed)
    ended_s = wait_for(lambda: driver.process.poll() is not None, _WATCH_S)
    is_gone = not any("raylet" in words for words in bed.processes(WORKER).values())
    after = f"the driver ends with {driver.process.poll()} after {ended_s:.1f} s" if ended_s else "the driver hangs"
    after += "; the worker has no Ray until its line is typed again" if is_gone else ""
    driver.end()
    for machine in (HEAD, WORKER):
        typed(machine, ray, "stop").wait()
    return Row("3, and 2 to end", ready_s, None, after, things_on(bed) - before)


def ours(bed: Bed, name: str, *, over_ssh: bool) -> Row:
    launch = {"hosts": [HEAD, WORKER]} if over_ssh else {}
    with Scene(bed, name, launch=launch, train={"total_steps": 400}) as scene:
        told = {**_OURS, "RAY_HEAD_IP": bed.address(HEAD)}
        words, driver = str(scene.config), ("--driver", STEPPING)
        before, begun = things_on(bed), time.monotonic()
        if over_ssh:
            commands = [scene.start(HEAD, "train", words, *driver, **_OURS)]
        else:
            commands = [scene.start(HEAD, "place", "host", "head", words, *driver, **told)]
            commands.append(scene.start(WORKER, "place", "host", "worker", words, **told))
        needed(wait_for(lambda: "Ray ready on 2 nodes" in commands[0].text), "ready", *commands)
        ready_s = time.monotonic() - begun
        needed(wait_for(lambda: scene.step >= 5), "stepping", *commands)
        kill_raylet(bed)
        (attempt,) = scene.attempts
        back_s = wait_for(lambda: commands[0].text.count("Ray ready on 2 nodes") > 1, _WATCH_S)
        step = scene.step
        if back_s is not None:
            back_s += needed(wait_for(lambda: scene.step > step), "stepping again", *commands)
        after = "Ray comes up again on both, and the driver goes on from its checkpoint" if back_s else "nothing"
        scene.start(HEAD, "stop", str(scene.run.path)).wait()
        codes = [command.wait(_ENDS_S) for command in commands]
        assert attempt.nodes == [HEAD, WORKER]
        assert codes[0] == 75, commands[0].text  # stopped, with a checkpoint
        return Row(f"{len(commands)}, and 1 to end", ready_s, back_s, after, things_on(bed) - before)


@click.command()
@click.option("--rounds", default=2, show_default=True)
def main(rounds: int) -> None:
    host.use_daemon_path(*packages.folders())
    bed = Bed.bring_up(BedLayout(Path(tempfile.mkdtemp(prefix="by-hand-", dir="/run"))), Shape("hosts", 2))
    ways = {
        "plain ray start": lambda number: plain(bed, bed.storage(HEAD)),
        "hpc-grpo place host head|worker": lambda number: ours(bed, f"by-hand-{number}", over_ssh=False),
        "hpc-grpo train, launch.hosts": lambda number: ours(bed, f"over-ssh-{number}", over_ssh=True),
    }
    rows: dict[str, list[Row]] = {way: [] for way in ways}
    try:
        for number in range(rounds):
            for way, measure in ways.items():
                rows[way].append(measure(number))
                print(f"round {number}: {way}: {rows[way][-1]}; load {load_average()}", flush=True)
    finally:
        bed.take_down()
    table = []
    for way, found in rows.items():
        back_s = [row.back_s for row in found if row.back_s is not None]
        goes_on = f"{median(back_s):.1f}" if len(back_s) == len(found) else "never"
        left = ", ".join(sorted(set().union(*(row.left for row in found)))) or "nothing"
        ready = f"{median([row.ready_s for row in found]):.1f}"
        table.append([way, found[0].lines, ready, goes_on, found[-1].after, left])
    header = ["", "lines", "s to Ray ready", "s to go on", "after the worker's raylet is killed", "left at the end"]
    print_table(f"Two hosts, medians of {rounds}; {load_average()}", header, table)


if __name__ == "__main__":
    main()
