"""How fast one learner's weights reach three engine processes of its node.

`python benchmarks/weight_publish.py`: bf16 tensors in the shapes of Qwen2.5-0.5B (290 tensors, 0.92 GiB), once
per round by each method, in turn, so that a busy moment hits all of them. Every engine ends with the weights in
tensors of its own. Times run from the learner's start until the last engine has answered.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from common import load_average, median, print_table

from hpc_grpo.learner.publish import WeightPublisher
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.buckets import Bucket, BucketLayout, bucket_layout
from hpc_grpo.weights.node_group import PUBLISHER_RANK, GroupMembership, NodeGroup
from hpc_grpo.weights.store import StoreSpec, WeightStore

_KEY = 7
_DEADLINE_S = 120.0
_NUM_BUFFERS = 2
_BUCKET_BYTES = 256 * 2**20
_DTYPE = torch.bfloat16

Tensors = Mapping[str, torch.Tensor]


def qwen2_specs(num_layers: int, vocabulary: int) -> list[ParameterSpec]:
    """The parameters of Qwen2.5-0.5B, which has 24 layers and a vocabulary of 151936."""
    hidden, inner, heads_kv = 896, 4864, 128
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (heads_kv, hidden),
        "self_attn.k_proj.bias": (heads_kv,),
        "self_attn.v_proj.weight": (heads_kv, hidden),
        "self_attn.v_proj.bias": (heads_kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return [ParameterSpec(name, shape, "bfloat16") for name, shape in shapes.items()]


class UncheckedStore(WeightStore):
    """Without checksums, to say what they cost."""

    def checksum(self, version: int, bucket: Bucket) -> int:
        return 0


class Method(ABC):
    """One way to bring the weights over; rank 0 publishes, the others receive into `tensors`."""

    @abstractmethod
    def publish(self, version: int) -> None: ...

    @abstractmethod
    def receive(self, version: int) -> float:
        """Returns the seconds the engine could not generate."""


class BroadcastEach(Method):
    """One Gloo broadcast per parameter."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def publish(self, version: int) -> None:
        self._broadcast_all()
        dist.barrier()

    def receive(self, version: int) -> float:
        started = time.perf_counter()
        self._broadcast_all()
        dist.barrier()
        return time.perf_counter() - started

    def _broadcast_all(self) -> None:
        for tensor in self._tensors.values():
            dist.broadcast(tensor, PUBLISHER_RANK)


class BroadcastBuckets(Method):
    """Gloo broadcasts of flat buckets, packed by the learner and unpacked by the engines."""

    def __init__(self, tensors: Tensors, layout: BucketLayout) -> None:
        self._tensors = tensors
        self._buckets = layout.buckets
        longest = max(sum(prod(slot.spec.shape) for slot in bucket.slots) for bucket in layout.buckets)
        self._flat = torch.zeros(longest, dtype=_DTYPE)

    def publish(self, version: int) -> None:
        for bucket in self._buckets:
            parts = [self._tensors[name].view(-1) for name in bucket.names]
            flat = self._flat[: sum(len(part) for part in parts)]
            torch.cat(parts, out=flat)
            dist.broadcast(flat, PUBLISHER_RANK)
        dist.barrier()

    def receive(self, version: int) -> float:
        started = time.perf_counter()
        for bucket in self._buckets:
            own = [self._tensors[name].view(-1) for name in bucket.names]
            flat = self._flat[: sum(len(tensor) for tensor in own)]
            dist.broadcast(flat, PUBLISHER_RANK)
            for tensor, part in zip(own, flat.split([len(tensor) for tensor in own]), strict=True):
                tensor.copy_(part)
        dist.barrier()
        return time.perf_counter() - started


class Store(Method):
    """hpc_grpo's transport: the store in shared memory, announced and acknowledged over the node's group."""

    def __init__(self, tensors: Tensors, layout: BucketLayout, member: GroupMembership, store_class: type[WeightStore]):
        self._tensors = tensors
        self._layout = layout
        is_learner = member.rank == PUBLISHER_RANK
        if is_learner:
            self._store = store_class(member.folder, StoreSpec(layout, _NUM_BUFFERS, _KEY), create=True)
        dist.barrier()
        if not is_learner:
            self._store = store_class(member.folder, StoreSpec(layout, _NUM_BUFFERS, _KEY), create=False)
        self._group = NodeGroup(member)
        self._publisher = WeightPublisher(layout, lambda names: nullcontext(self._tensors), self._store)
        self._publisher.join(self._group)

    def publish(self, version: int) -> None:
        self._publisher.stage(version)
        self._publisher.announce()

    def receive(self, version: int) -> float:
        stored = self._group.receive_announcement(len(self._layout.buckets))
        # The driver stops the engines only when the version has been staged.
        paused = time.perf_counter()
        self._store.verify(stored)
        for bucket in self._layout.buckets:
            for name, tensor in self._store.tensors(stored.buffer, bucket):
                self._tensors[name].copy_(tensor)
        self._group.acknowledge(stored.version)
        return time.perf_counter() - paused


STORE, UNCHECKED = "hpc_grpo", "hpc_grpo, no checksums"
METHODS = ("Gloo, one broadcast a parameter", "Gloo, 256 MiB flat buckets", STORE, UNCHECKED)


@dataclass(frozen=True)
class Setting:
    folder: Path
    specs: Sequence[ParameterSpec]
    num_engines: int
    num_rounds: int


def methods(setting: Setting, tensors: Tensors, rank: int) -> dict[str, Method]:
    layout = bucket_layout(setting.specs, _BUCKET_BYTES)
    size = setting.num_engines + 1
    made: list[Method] = [BroadcastEach(tensors), BroadcastBuckets(tensors, layout)]
    for folder, store_class in (("checked", WeightStore), ("unchecked", UncheckedStore)):
        member = GroupMembership(setting.folder / folder, rank, size, _DEADLINE_S)
        made.append(Store(tensors, layout, member, store_class))
    return dict(zip(METHODS, made, strict=True))


def join(setting: Setting, rank: int) -> None:
    torch.set_num_threads(1)
    rendezvous = dist.FileStore(str(setting.folder / "gloo"), setting.num_engines + 1)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=setting.num_engines + 1)


def engine(setting: Setting, rank: int, pauses: Any) -> None:
    """An engine process: receives every version by every method, checks what arrived, and reports its pauses."""
    join(setting, rank)
    tensors = {spec.name: torch.zeros(spec.shape, dtype=_DTYPE) for spec in setting.specs}
    last = setting.specs[-1].name
    by_name = methods(setting, tensors, rank)
    for version in range(setting.num_rounds + 1):
        for name, method in by_name.items():
            dist.barrier()
            pauses.put((name, version, method.receive(version)))
            if tensors[last][0].item() != version + 1:
                raise RuntimeError(f"{name}: version {version} did not arrive")
    dist.barrier()


def learner(setting: Setting) -> tuple[dict[str, list[float]], list[float]]:
    """Publish every version by every method; gives the seconds by method, without the first round, and memcpy's."""
    join(setting, PUBLISHER_RANK)
    tensors = {spec.name: torch.ones(spec.shape, dtype=_DTYPE) for spec in setting.specs}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    by_name = methods(setting, tensors, PUBLISHER_RANK)
    published: dict[str, list[float]] = {name: [] for name in METHODS}
    memcpy = []
    for version in range(setting.num_rounds + 1):
        for tensor in tensors.values():
            tensor.fill_(version + 1)
        started = time.perf_counter()
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
        memcpy.append(time.perf_counter() - started)
        for name, method in by_name.items():
            dist.barrier()
            started = time.perf_counter()
            method.publish(version)
            published[name].append(time.perf_counter() - started)
    dist.barrier()
    return {name: seconds[1:] for name, seconds in published.items()}, memcpy[1:]


def report(setting: Setting, published: Mapping[str, list[float]], pauses: Mapping[str, float], copy_s: float) -> None:
    gigabytes = sum(prod(spec.shape) for spec in setting.specs) * 2 / 1e9

    def row(label: str, seconds: float) -> list[str]:
        return [label, f"{seconds * 1e3:.0f}", f"{gigabytes / seconds:.2f}"]

    rows = [row(name, median(seconds)) for name, seconds in published.items()]
    rows += [row(f"{name}: the engines' pause alone", pauses[name]) for name in (STORE, UNCHECKED)]
    rows.append(row("memcpy by one thread, nothing else running", copy_s))
    print_table(
        f"{gigabytes / 1.073741824:.2f} GiB in {len(setting.specs)} tensors to {setting.num_engines} engines, "
        f"medians of {setting.num_rounds} ({load_average()})",
        ["until every engine has acknowledged", "ms", "GB/s per engine"],
        rows,
    )
    total, unchecked = median(published[STORE]), median(published[UNCHECKED])
    print(
        f"Checksums cost {(total - unchecked) * 1e3:.0f} ms of {total * 1e3:.0f} ms, "
        f"and {(pauses[STORE] - pauses[UNCHECKED]) * 1e3:.0f} ms of the pause of {pauses[STORE] * 1e3:.0f} ms."
    )
    for name in METHODS[:2]:
        print(f"hpc_grpo is {median(published[name]) / total:.1f} x as fast as: {name}")


@click.command()
@click.option("--engines", default=3, show_default=True)
@click.option("--rounds", default=7, show_default=True, help="After one that is not counted.")
@click.option("--quick", is_flag=True, help="Two layers, a small vocabulary and two rounds.")
def main(engines: int, rounds: int, quick: bool) -> None:
    specs = qwen2_specs(2, 4096) if quick else qwen2_specs(24, 151936)
    with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-", dir="/dev/shm") as folder:
        setting = Setting(Path(folder), specs, engines, 2 if quick else rounds)
        for name in ("checked", "unchecked"):
            (setting.folder / name).mkdir()
        context = multiprocessing.get_context("spawn")
        pauses = context.SimpleQueue()
        processes = [
            context.Process(target=engine, args=(setting, rank, pauses), daemon=True) for rank in range(1, engines + 1)
        ]
        for process in processes:
            process.start()
        published, memcpy = learner(setting)
        reported = [pauses.get() for _ in range(engines * (setting.num_rounds + 1) * len(METHODS))]
        for process in processes:
            process.join()
    # Of a round the longest: that engine decides when generation is whole again.
    longest: dict[tuple[str, int], float] = {}
    for name, version, seconds in reported:
        longest[name, version] = max(seconds, longest.get((name, version), 0.0))
    counted = range(1, setting.num_rounds + 1)
    pause_by_method = {name: median([longest[name, version] for version in counted]) for name in METHODS}
    report(setting, published, pause_by_method, median(memcpy))


if __name__ == "__main__":
    main()
