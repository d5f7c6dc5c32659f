"""Which NCCL the probe's process has loaded."""

from __future__ import annotations

import pytest

from hpc_grpo.preflight.torch_probe import mapped_library, nccl_in_use

MAPS = """\
5581d0a00000-5581d0a01000 r--p 00000000 08:01 1311 /usr/bin/python3.11
7f1200000000-7f1240000000 rw-p 00000000 00:00 0
7f12a0000000-7f12a0010000 r-xp 00000000 08:01 77 /home/me/a venv/nvidia/nccl/lib/libnccl.so.2
7f12b0000000-7f12b0010000 r-xp 00000000 08:01 78 /opt/aws-ofi-nccl/lib/libnccl-net-ofi.so
7f12c0000000-7f12c0010000 rw-s 00000000 00:05 79 /dev/shm/nccl-a1 (deleted)
"""


def test_libraries_are_found_by_name_among_what_is_mapped() -> None:
    assert mapped_library("libnccl.so", MAPS) == "/home/me/a venv/nvidia/nccl/lib/libnccl.so.2"
    assert mapped_library("libnccl-net", MAPS) == "/opt/aws-ofi-nccl/lib/libnccl-net-ofi.so"
    assert mapped_library("libmpi.so", MAPS) == ""


def test_a_torch_for_cpus_has_no_nccl() -> None:
    dist = pytest.importorskip("torch.distributed")
    if dist.is_nccl_available():
        pytest.skip("this torch is built with NCCL")
    assert nccl_in_use() == {"nccl_version": "", "nccl_library": "", "nccl_plugin": ""}
