"""GPUs and CUDA versions, read from what commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.preflight.node_facts import (
    cannot_compile,
    gpus_of_job,
    parse_driver_cuda,
    parse_wheel_cuda,
)
from hpc_grpo.system.gpus import Gpu


def test_the_cuda_of_the_driver_is_read() -> None:
    assert parse_driver_cuda("| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: 13.0 |") == "13.0"
    assert parse_driver_cuda("garbage") == ""


def test_the_cuda_of_a_wheel_is_read_from_its_version_file() -> None:
    assert (
        parse_wheel_cuda("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n") == "13.0"
    )
    assert (
        parse_wheel_cuda("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n") == ""
    )


def test_gpus_of_other_jobs_do_not_count() -> None:
    four = [Gpu(index, "NVIDIA GH200 120GB", 12, 0) for index in range(4)]
    assert [gpu.index for gpu in gpus_of_job(four, {"CUDA_VISIBLE_DEVICES": "2,3"})] == [2, 3]
    assert len(gpus_of_job(four, {})) == 4
    assert len(gpus_of_job(four, {"CUDA_VISIBLE_DEVICES": "GPU-5f3c,GPU-77"})) == 4  # named by UUID


def test_triton_compiles_with_a_compiler_on_path_or_the_one_that_cc_names(tmp_path: Path) -> None:
    assert "no C compiler" in cannot_compile({"PATH": str(tmp_path)})
    assert cannot_compile({"PATH": str(tmp_path), "CC": "icx"}) == ""
    gcc = tmp_path / "gcc"
    gcc.touch(mode=0o755)
    assert cannot_compile({"PATH": str(tmp_path)}) == ""


def test_python_without_headers_is_named_by_the_file_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere/include")
    assert cannot_compile({"CC": "gcc"}) == "/nowhere/include/Python.h is missing"
