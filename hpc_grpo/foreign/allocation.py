"""AReaL's `allocation_mode`, and what several systems' counts of learners and engines are on nodes that are all alike.

The grammar is AReaL's own (inclusionAI/AReaL, areal/api/alloc_mode.py): `vllm.d4p1t2+d8`, `vllm:d4t1+fsdp:d2`, names
as in `vllm[rollout]:d4+fsdp[actor]:d4`, `m` for `t` in version 0.3; d is data, t tensor and p pipeline parallelism.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpc_grpo.foreign.table import RefusedError

_PART = re.compile(r"(?:(?P<backend>[a-z]+)(?:[\[(]\w+[\])])?[.:]?)??(?P<sizes>(?:[dtmpce]\d+)+)")
_SIZE = re.compile(r"([dtmpce])(\d+)")
_ENGINES = ("vllm", "sglang")
_FORM = "ENGINE:dN[tM]+[fsdp:]dN, such as vllm:d4t1+d2"


@dataclass(frozen=True)
class Part:
    """One side of an allocation: `backend` is "" where none is named."""

    backend: str
    sizes: dict[str, int]

    def size(self, kind: str) -> int:
        return self.sizes.get(kind, 1)


def parse_allocation(text: str) -> tuple[Part, Part]:
    """Return the parts that generate and train. Raises RefusedError for other forms, among them shared GPUs (`|`)."""
    if "|" in text or text.count("+") != 1:
        raise RefusedError(f"allocation_mode = {text!r} must be one part that generates and one that trains: {_FORM}")
    generates, trains = (_part(part.strip(), text) for part in text.split("+"))
    if generates.backend not in _ENGINES:
        raise RefusedError(f"allocation_mode = {text!r} must begin with the engine: {_FORM}")
    return generates, trains


def _part(text: str, whole: str) -> Part:
    found = _PART.fullmatch(text)
    if found is None:
        raise RefusedError(f"allocation_mode = {whole!r}: {text!r} cannot be read. Write {_FORM}")
    sizes = {kind.replace("m", "t"): int(size) for kind, size in _SIZE.findall(found["sizes"])}
    return Part(found["backend"] or "", sizes)


def allocation_values(text: str, nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Return our keys for an allocation on so many nodes.

    Raises RefusedError for what is not here, and for wrong sums.
    """
    generates, trains = parse_allocation(text)
    engines, tensor, learners = generates.size("d"), generates.size("t"), trains.size("d")
    num_gpus = engines * tensor * generates.size("p") + learners * trains.size("t") * trains.size("p") * trains.size(
        "c"
    )
    if num_gpus != nodes * gpus_per_node:
        raise RefusedError(
            f"allocation_mode = {text} takes {num_gpus} GPUs, and {nodes} nodes of {gpus_per_node} have "
            f"{nodes * gpus_per_node}"
        )
    shape = node_shape(learners, engines, tensor, nodes, gpus_per_node)
    if generates.backend == "sglang":
        raise RefusedError("engines are vLLM's: SGLang is not here. Write vllm in its place", shape)
    if generates.size("p") > 1:
        raise RefusedError("pipeline parallelism of engines is not here; tensor parallelism (t) is", shape)
    for kind, name in (("p", "pipeline"), ("t", "tensor"), ("c", "context"), ("e", "expert")):
        if trains.size(kind) > 1:
            why = "learners are data parallel, with their states sharded by ZeRO (train.zero_stage)"
            raise RefusedError(f"{name} parallelism in training is not here: {why}. Write d alone", shape)
    if trains.backend in ("megatron", "archon"):
        raise RefusedError(
            f"learners are DeepSpeed's: {trains.backend.capitalize()} is not here. Write fsdp, which ZeRO 3 stands for",
            shape,
        )
    return shape


def node_shape(learners: int, engines: int, tensor: int, nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Return our keys for so many learners and engines in all; each node here has as many as every other.

    Raises RefusedError where they cannot be shared out evenly; --lenient takes the nearest shape that uses all GPUs.
    """
    shape = {
        "launch.num_nodes": nodes,
        "launch.slurm.gpus_per_node": gpus_per_node,
        "engine.tensor_parallel": tensor,
        "placement.learners_per_node": learners // nodes,
        "engine.engines_per_node": engines // nodes,
    }
    if learners % nodes == 0 and engines % nodes == 0:
        return shape
    per_node = min(max(1, round(learners / nodes)), max(1, gpus_per_node - tensor))
    shape["placement.learners_per_node"] = per_node
    shape["engine.engines_per_node"] = max(1, (gpus_per_node - per_node) // tensor)
    raise RefusedError(
        f"{learners} learners and {engines} engines cannot be shared out evenly among {nodes} nodes, which are all "
        f"alike here. Change them to multiples of {nodes}",
        shape,
    )
