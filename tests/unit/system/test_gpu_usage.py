"""How busy GPUs are, with a stand-in for NVML: pynvml itself needs a driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.system import usage
from hpc_grpo.system.usage import GpuMeter, find_handles


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


@pytest.mark.parametrize(
    ("visible", "fetches", "mean"),
    [
        (["0"], [{"GPU-a": [(1, 100), (2, 50)]}, {"GPU-a": [(2, 50), (3, 0), (4, 30)]}], 0.45),
        (["1", "GPU-a"], [{"GPU-a": [(1, 20)], "GPU-b": [(7, 80)]}], 0.5),
        (["MIG-c6b63f1b"], [{}], None),
        (["0"], [{}], None),
    ],
    ids=["over all fetches", "by number and UUID", "not supported", "no samples"],
)
def test_samples_since_the_last_reading_are_averaged(visible: Any, fetches: Any, mean: Any) -> None:
    nvml, meter = FakeNvml(), GpuMeter()
    handles = find_handles(nvml, visible)
    for kept in fetches:
        nvml.kept |= kept
        meter.fetch(nvml, handles)
    assert meter.read() == mean
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
    monkeypatch.setattr(usage, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(InterruptedError):
        meter.keep_fetching()
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
    meter.keep_fetching()
    assert meter.read() is None
