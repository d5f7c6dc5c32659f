"""How busy GPUs are, with a stand-in for NVML: pynvml itself needs a driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.system import gpu_usage
from hpc_grpo.system.gpu_usage import GpuMeter, find_sampled_gpus


class NVMLError(Exception):
    pass


class FakeNvml:
    """NVML of a node with GPUs 0 and 1, of which it keeps the samples that it is given, oldest first."""

    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVMLError = NVMLError

    def __init__(self) -> None:
        self.is_up = False
        self.kept: dict[str, list[tuple[int, int]]] = {"GPU-a": [], "GPU-b": []}

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_up = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if not self.is_up or index >= len(self.kept):
            raise NVMLError
        return list(self.kept)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if not self.is_up or not uuid.startswith(("GPU-a", "GPU-b", "MIG-")):
            raise NVMLError
        return uuid

    def nvmlDeviceGetSamples(self, handle: str, kind: int, last_seen: int) -> tuple[int, list[Any]]:  # noqa: N802
        assert kind == self.NVML_GPU_UTILIZATION_SAMPLES
        if handle not in self.kept:
            raise NVMLError("Not Supported")
        new = [sample for sample in self.kept[handle] if sample[0] > last_seen]
        if not new:
            raise NVMLError("Not Found")
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=percent)) for at, percent in new]


def test_samples_since_the_last_reading_are_averaged_over_all_fetches() -> None:
    nvml, meter = FakeNvml(), GpuMeter()
    gpus = find_sampled_gpus(nvml, ["0"])
    nvml.kept["GPU-a"] = [(1_000, 100), (2_000, 50)]
    meter.fetch(nvml, gpus)
    nvml.kept["GPU-a"] = [(2_000, 50), (3_000, 0), (4_000, 30)]
    meter.fetch(nvml, gpus)
    assert meter.read() == 0.45
    assert meter.read() is None
    nvml.kept["GPU-a"].append((5_000, 10))
    meter.fetch(nvml, gpus)
    assert meter.read() == 0.1


def test_gpus_of_an_engine_are_averaged_by_number_and_by_uuid() -> None:
    nvml, meter = FakeNvml(), GpuMeter()
    gpus = find_sampled_gpus(nvml, ["1", "GPU-a"])
    nvml.kept = {"GPU-a": [(1_000, 20)], "GPU-b": [(7_000, 80)]}
    meter.fetch(nvml, gpus)
    assert meter.read() == 0.5


@pytest.mark.parametrize("name", ["MIG-c6b63f1b", "0"], ids=["not supported", "no samples"])
def test_a_gpu_without_samples_has_no_utilization(name: str) -> None:
    nvml, meter = FakeNvml(), GpuMeter()
    meter.fetch(nvml, find_sampled_gpus(nvml, [name]))
    assert meter.read() is None


def test_what_was_sampled_before_the_process_had_its_gpus_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, readings, meter = FakeNvml(), [], GpuMeter()
    nvml.kept["GPU-b"] = [(1_000, 100)]

    def sleep(_: float) -> None:
        readings.append(meter.read())
        if len(readings) == 2:
            raise InterruptedError
        nvml.kept["GPU-b"].append((2_000, 40))

    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(gpu_usage, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(InterruptedError):
        meter._keep_on()
    assert readings == [None, 0.4]


@pytest.mark.parametrize(
    ("module", "visible"),
    [(None, "0"), (FakeNvml(), "7"), (FakeNvml(), "")],
    ids=["no nvidia-ml-py", "unknown to NVML", "no GPU"],
)
def test_a_process_whose_gpus_cannot_be_sampled_goes_on_without(
    module: Any, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = GpuMeter()
    meter._keep_on()
    assert meter.read() is None
