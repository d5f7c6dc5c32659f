from __future__ import annotations

import gzip
import json
import time

import torch

from hpc_grpo.metrics.profiling import StackProfile, TorchTrace


def wait_where_it_can_be_seen() -> None:
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        sum(range(1000))


def test_the_stack_profile_names_where_the_thread_was() -> None:
    profile = StackProfile()
    wait_where_it_can_be_seen()
    page = profile.stop()
    assert b"wait_where_it_can_be_seen" in page
    assert b'<head><meta http-equiv="Content-Security-Policy"' in page, "it asks no network for anything"


def test_the_trace_has_the_operations_of_forward_and_backward() -> None:
    trace = TorchTrace()
    weight = torch.ones(4, 4, requires_grad=True)
    (weight @ weight).sum().backward()
    events = json.loads(gzip.decompress(trace.stop()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= names
