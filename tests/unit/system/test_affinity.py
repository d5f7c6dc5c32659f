"""The cores of a process beside its GPUs, on a tree that stands for /sys."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.system import gpus
from hpc_grpo.system.commands import Answer
from hpc_grpo.system.gpus import find_gpus, keep_near_gpus, parse_cpulist, parse_gpus, wait_for_free_gpus

GH200 = """\
0, NVIDIA GH200 120GB, 12, 3, GPU-aa11, 00000009:01:00.0, 97871
1, NVIDIA GH200 120GB, 7, [N/A], GPU-bb22, 00000019:01:00.0, 97871
2, NVIDIA GH200 120GB, 7, 0, GPU-cc33, 00000029:01:00.0, 97871
3, NVIDIA GH200 120GB, 7, 0, GPU-cd44, 00000039:01:00.0, 97871
"""
ADDRESSES = ["0009:01:00.0", "0019:01:00.0", "0029:01:00.0", "0039:01:00.0"]
ALL_CORES = set(range(288))


class Cores:
    """The cores of this process and its threads, as the kernel would keep them."""

    def __init__(self, allowed: set[int]) -> None:
        self.of_threads = dict.fromkeys((int(task.name) for task in Path("/proc/self/task").iterdir()), allowed)

    def get(self, pid: int) -> set[int]:
        return self.of_threads[os.getpid()]

    def set(self, thread: int, cores: set[int]) -> None:
        self.of_threads[thread] = cores


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A GH200 node: CPU i has cores 72 i to 72 i + 71 and GPU i; GPUs' memory is further NUMA nodes without cores."""
    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_cpu").write_text("0-3\n")
    for number, address in enumerate(ADDRESSES):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{72 * number}-{72 * number + 71}\n")
    return tmp_path


@pytest.fixture
def whole_node(monkeypatch: pytest.MonkeyPatch) -> Cores:
    return use(monkeypatch, Cores(ALL_CORES))


def use(monkeypatch: pytest.MonkeyPatch, cores: Cores) -> Cores:
    monkeypatch.setattr(gpus.os, "sched_getaffinity", cores.get)
    monkeypatch.setattr(gpus.os, "sched_setaffinity", cores.set)
    return cores


def bind(node: Path, visible: str, num_threads: int | str = 1, listed: Answer | None = None) -> str:
    environ = {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(num_threads)}
    return keep_near_gpus(environ, node, lambda: listed or Answer(GH200))


@pytest.mark.parametrize(("visible", "num_threads"), [("2", 16), ("GPU-cc33", "16,2"), ("GPU-cc", "")])
def test_a_process_with_a_gpu_is_bound_to_the_cores_beside_it(
    visible: str, num_threads: int | str, node: Path, whole_node: Cores
) -> None:
    assert bind(node, visible, num_threads) == "Bound to 72 of 288 cores: those near 0029:01:00.0."
    assert set(map(frozenset, whole_node.of_threads.values())) == {frozenset(range(144, 216))}


def test_a_process_with_two_gpus_has_the_cores_of_both(node: Path, whole_node: Cores) -> None:
    """Those of an engine with tensor parallelism: its workers inherit them."""
    bind(node, "0,3")
    assert whole_node.get(0) == set(range(72)) | set(range(216, 288))


def test_the_cpuset_of_a_job_is_kept(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = use(monkeypatch, Cores({70, 71, 72, 73}))
    assert bind(node, "0", num_threads=2) == "Bound to 2 of 4 cores: those near 0009:01:00.0."
    assert job.get(0) == {70, 71}


@pytest.mark.parametrize(
    ("visible", "reason"), [("0", "only 2 of 4 are those near 0009:01:00.0"), ("3", "only 0 of 4 are those near 0039")]
)
def test_a_process_with_too_few_cores_beside_its_gpu_keeps_them_all(
    visible: str, reason: str, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = use(monkeypatch, Cores({70, 71, 72, 73}))
    assert reason in bind(node, visible, num_threads=4)
    assert job.get(0) == {70, 71, 72, 73}


def test_nothing_happens_on_a_machine_of_one_numa_node(node: Path, whole_node: Cores) -> None:
    (node / "devices/system/node/has_cpu").write_text("0\n")
    assert bind(node, "2", listed=Answer(error="nvidia-smi was asked")) == ""
    assert whole_node.get(0) == ALL_CORES


def test_nothing_happens_without_a_gpu(node: Path, whole_node: Cores) -> None:
    assert bind(node, "", listed=Answer(error="nvidia-smi was asked")) == ""
    assert whole_node.get(0) == ALL_CORES


def test_nothing_happens_where_the_firmware_does_not_say(node: Path, whole_node: Cores) -> None:
    """The kernel then lists every core."""
    (node / "bus/pci/devices/0029:01:00.0/local_cpulist").write_text("0-287\n")
    assert bind(node, "2") == ""
    assert whole_node.get(0) == ALL_CORES


@pytest.mark.parametrize(
    ("visible", "listed", "reason"),
    [
        ("0", Answer(error="no nvidia-smi on PATH", is_absent=True), "no nvidia-smi on PATH"),
        ("MIG-aa11", Answer(GH200), "does not list all of CUDA_VISIBLE_DEVICES = MIG-aa11"),
        ("0", Answer("No devices were found\n"), "does not list all of CUDA_VISIBLE_DEVICES = 0"),
        ("GPU-c", Answer(GH200), "does not list all of CUDA_VISIBLE_DEVICES = GPU-c"),
    ],
)
def test_gpus_that_are_not_known_leave_the_process_alone(
    visible: str, listed: Answer, reason: str, node: Path, whole_node: Cores
) -> None:
    assert reason in bind(node, visible, listed=listed)
    assert whole_node.get(0) == ALL_CORES


def test_a_container_that_forbids_it_leaves_the_process_alone(
    node: Path, whole_node: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(thread: int, cores: set[int]) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(gpus.os, "sched_setaffinity", forbid)
    assert bind(node, "0") == "Cores are not bound: Operation not permitted."


@pytest.fixture
def own_cores() -> Iterator[set[int]]:
    """This process's own; given back afterwards."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    yield before
    os.sched_setaffinity(0, before)


def test_threads_that_run_already_are_bound_too(node: Path, own_cores: set[int]) -> None:
    """As Ray's are, before an actor is made."""
    first = min(own_cores)
    (node / "bus/pci/devices/0009:01:00.0/local_cpulist").write_text(f"{first}\n")
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        bind(node, "0")
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == {first}
    finally:
        done.set()
        thread.join()


def test_gpus_are_found_by_number_and_uuid() -> None:
    listed = parse_gpus(GH200)
    assert [gpu.pci_address for gpu in listed] == ADDRESSES
    assert [(gpu.index, gpu.used_mib, gpu.utilization) for gpu in listed[:2]] == [(0, 12, 3), (1, 7, 0)]
    assert find_gpus(["GPU-aa11", "1"], listed) == listed[:2]


def waited(used: list[str], share: float, total: str = "97871", visible: str = "1") -> int:
    """How often `wait_for_free_gpus` sleeps, if GPU 1 uses these MiB at one look after the other."""
    looks, sleeps = iter(used), list[float]()

    def ask() -> Answer:
        lines = GH200.splitlines()
        lines[1] = f"1, NVIDIA GH200 120GB, {next(looks)}, 0, GPU-bb22, 00000019:01:00.0, {total}"
        return Answer("\n".join(lines), "")

    wait_for_free_gpus(share, {"CUDA_VISIBLE_DEVICES": visible}, ask, sleeps.append)
    return len(sleeps)


def test_an_engine_waits_until_the_gpu_of_a_killed_engine_is_free() -> None:
    assert waited(["90000", "90000", "40000", "600"], 0.9) == 3
    assert waited(["40000", "600"], 0.45) == 0, "the share of an engine beside a learner is free"
    assert waited(["90000"], 0.9, visible="0") == 0, "the memory of other GPUs does not count"
    assert waited(["90000"] * 60, 0.9) == 60, "vLLM says what is missing after a minute"


@pytest.mark.parametrize(("total", "visible"), [("[N/A]", "1"), ("97871", "MIG-12ab"), ("97871", "")])
def test_an_engine_does_not_wait_for_memory_that_nvidia_smi_does_not_know(total: str, visible: str) -> None:
    assert waited(["90000"], 0.9, total, visible) == 0


def test_lists_of_the_kernel() -> None:
    assert parse_cpulist("0-1,4,6-7\n") == {0, 1, 4, 6, 7}
    assert parse_cpulist("\n") == set()
