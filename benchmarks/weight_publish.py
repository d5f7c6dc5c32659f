"""How fast learners' weights reach the engines of their nodes, beside memcpy of the same bytes.

`python benchmarks/weight_publish.py`: bf16 tensors in the shapes of Qwen2.5-0.5B (290 tensors, 0.92 GiB), once per
round by each method, in turn, so that a busy moment hits all of them. Times run from the learner's start until the last
engine has answered. Every engine ends with the weights in tensors of its own. `--nodes 1,2,4` is as many nodes at once,
each with processes, store and groups of its own, on the cores of this machine: what counts is the ratio to memcpy,
which the same processes do at the same time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.distributed as dist
from common import load_average, median, print_table

from hpc_grpo.learner.publish import WeightPublisher
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.node_group import PUBLISHER_RANK, GroupMembership, NodeGroup
from hpc_grpo.weights.store import StoredVersion, StoreSpec, WeightStore, bucket_layout, views

_DEADLINE_S = 120.0
_BUCKET_BYTES = 256 * 2**20


def qwen2_specs(num_layers: int, vocabulary: int) -> list[ParameterSpec]:
    """The parameters of Qwen2.5-0.5B, which has 24 layers and a vocabulary of 151936."""
    hidden, inner, heads_kv = 896, 4864, 128
    layer: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q", hidden), ("k", heads_kv), ("v", heads_kv)):
        layer |= {f"self_attn.{name}_proj.weight": (rows, hidden), f"self_attn.{name}_proj.bias": (rows,)}
    layer |= {
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


class Member:
    """A learner (rank 0) or an engine of one node: its weights, and the node's store."""

    def __init__(self, folder: Path, specs: Sequence[ParameterSpec], rank: int, size: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "gloo"), size), rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.layout = bucket_layout(specs, _BUCKET_BYTES)
        self.flat = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.tensors = {name: tensor for bucket in self.layout.buckets for name, tensor in views(self.flat, bucket)}
        spec = StoreSpec(self.layout, key=7)
        if rank == PUBLISHER_RANK:
            self.store = WeightStore(folder, spec, create=True)
        dist.barrier()
        if rank != PUBLISHER_RANK:
            self.store = WeightStore(folder, spec, create=False)
        self.group = NodeGroup(GroupMembership(folder, rank, size, _DEADLINE_S))


class Method(ABC):
    """One way to bring the weights over; the learner publishes, engines receive into their tensors."""

    def __init__(self, member: Member) -> None:
        self.member = member

    @abstractmethod
    def publish(self, version: int) -> None: ...

    @abstractmethod
    def receive(self) -> float:
        """Returns the seconds the engine could not generate."""


class Memcpy(Method):
    """The limit: the learner's parameters into shared memory, and one copy an engine, all engines at once."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        shared = (pair for bucket in member.layout.buckets for pair in member.store.tensors(bucket))
        self.pairs = [(bytes_of(view), bytes_of(member.tensors[name])) for name, view in shared]

    def publish(self, version: int) -> None:
        for shared, own in self.pairs:
            np.copyto(shared, own)
        dist.barrier()
        dist.barrier()

    def receive(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        for shared, own in self.pairs:
            np.copyto(own, shared)
        paused_s = time.perf_counter() - started
        dist.barrier()
        return paused_s


class FlatMemcpy(Memcpy):
    """As if the model were one tensor: stores of so many bytes at once bypass the caches."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self.pairs = [(bytes_of(member.store.raw), bytes_of(member.flat))]


def bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


class BroadcastEach(Method):
    """One Gloo broadcast per parameter."""

    def publish(self, version: int) -> None:
        for tensor in self.member.tensors.values():
            dist.broadcast(tensor, PUBLISHER_RANK)
        dist.barrier()

    def receive(self) -> float:
        started = time.perf_counter()
        self.publish(0)
        return time.perf_counter() - started


class BroadcastBuckets(Method):
    """Gloo broadcasts of flat buckets, packed by the learner and unpacked by the engines."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        buckets = [[member.tensors[name].view(-1) for name in bucket.names] for bucket in member.layout.buckets]
        lengths = [sum(map(len, own)) for own in buckets]
        longest = torch.zeros(max(lengths), dtype=torch.bfloat16)
        self._buckets = [(own, longest[:length]) for own, length in zip(buckets, lengths, strict=True)]

    def publish(self, version: int) -> None:
        for own, flat in self._buckets:
            torch.cat(own, out=flat)
            dist.broadcast(flat, PUBLISHER_RANK)
        dist.barrier()

    def receive(self) -> float:
        started = time.perf_counter()
        for own, flat in self._buckets:
            dist.broadcast(flat, PUBLISHER_RANK)
            for tensor, part in zip(own, flat.split([len(tensor) for tensor in own]), strict=True):
                tensor.copy_(part)
        dist.barrier()
        return time.perf_counter() - started


class Store(Method):
    """hpc_grpo's transport; a broadcast and a barrier stand for the driver's calls between its three stages."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._publisher = WeightPublisher(member.layout, lambda names: nullcontext(member.tensors), member.store)
        self._publisher.group = member.group

    def publish(self, version: int) -> None:
        dist.broadcast_object_list([self._publisher.stage(version)], PUBLISHER_RANK)
        dist.barrier()
        self._publisher.announce()

    def receive(self) -> float:
        staged: list[Any] = [None]
        dist.broadcast_object_list(staged, PUBLISHER_RANK)
        member, verified = self.member, staged[0]
        member.store.verify(verified, member.rank - 1, member.size - 1)
        dist.barrier()
        paused = time.perf_counter()
        stored: StoredVersion = member.group.receive_announcement(len(member.layout.blocks))
        if stored != verified:
            raise RuntimeError(f"announced was {stored}, verified {verified}")
        for bucket in member.layout.buckets:
            for name, tensor in member.store.tensors(bucket):
                member.tensors[name].copy_(tensor)
        member.group.acknowledge(stored.version)
        return time.perf_counter() - paused


METHODS: dict[str, type[Method]] = {
    "memcpy": Memcpy,
    "memcpy of one flat tensor": FlatMemcpy,
    "hpc_grpo": Store,
    "Gloo, 256 MiB flat buckets": BroadcastBuckets,
    "Gloo, one broadcast a parameter": BroadcastEach,
}


class Setting(NamedTuple):
    specs: Sequence[ParameterSpec]
    num_nodes: int
    num_engines: int
    num_rounds: int


def work(folder: Path, setting: Setting, rank: int, everybody: Any, results: Any) -> None:
    """Take part in every method, round by round; report seconds: of the learner all, of an engine its pause."""
    member = Member(folder, setting.specs, rank, setting.num_engines + 1)
    methods = {name: method(member) for name, method in METHODS.items()}
    last = member.tensors[setting.specs[-1].name]
    turns = itertools.product(range(setting.num_rounds + 1), methods.items())
    for version, (counted, (name, method)) in enumerate(turns, start=1):
        if rank == PUBLISHER_RANK:
            member.flat.view(torch.bfloat16).fill_(version)
        everybody.wait()
        started = time.perf_counter()
        if rank == PUBLISHER_RANK:
            method.publish(version)
            seconds = time.perf_counter() - started
        else:
            seconds = method.receive()
        if last[-1].item() != version:
            raise RuntimeError(f"{name}: version {version} did not arrive")
        results.put((name, rank == PUBLISHER_RANK, counted, seconds))
    everybody.wait()


def measure(setting: Setting) -> dict[tuple[str, bool, int], float]:
    """Return the longest publish (True) and the longest pause of each round; round 0 is for warming up."""
    context = multiprocessing.get_context("spawn")
    num_members = setting.num_nodes * (setting.num_engines + 1)
    everybody, results = context.Barrier(num_members, timeout=_DEADLINE_S), context.Queue()
    longest: dict[tuple[str, bool, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-", dir="/dev/shm") as shared:
        folders = [Path(shared, f"node-{node}") for node in range(setting.num_nodes)]
        members = []
        for folder, rank in itertools.product(folders, range(setting.num_engines + 1)):
            folder.mkdir(exist_ok=True)
            members.append(context.Process(target=work, args=(folder, setting, rank, everybody, results), daemon=True))
            members[-1].start()
        for _ in range(num_members * (setting.num_rounds + 1) * len(METHODS)):
            name, is_whole, counted, seconds = results.get(timeout=_DEADLINE_S)
            longest[name, is_whole, counted] = max(seconds, longest.get((name, is_whole, counted), 0.0))
        for process in members:
            process.join()
    return longest


def report(setting: Setting, longest: dict[tuple[str, bool, int], float]) -> None:
    """Print medians; a ratio is that of neighbours in one round, so that a busy moment hits both sides of it."""
    gib, rounds = bucket_layout(setting.specs, _BUCKET_BYTES).num_bytes / 2**30, range(1, setting.num_rounds + 1)
    rows = []
    for name in METHODS:
        seconds = [median([longest[name, w, n] for n in rounds]) for w in (True, False)]
        ratios = [median([longest[name, w, n] / longest["memcpy", w, n] for n in rounds]) for w in (True, False)]
        rows.append([name, *(f"{each * 1e3:.0f}" for each in seconds), *(f"{each:.2f}" for each in ratios)])
    print_table(
        f"{gib:.2f} GiB in {len(setting.specs)} tensors, {setting.num_engines} engines on each of {setting.num_nodes} "
        f"nodes, medians of {setting.num_rounds} ({load_average()})",
        ["", "whole, ms", "pause, ms", "whole / memcpy", "pause / memcpy"],
        rows,
    )


@click.command()
@click.option("--engines", default=3, show_default=True)
@click.option("--nodes", default="1", show_default=True, help="Numbers of nodes, one after the other: 1,2,4.")
@click.option("--rounds", default=3, show_default=True, help="After one that is not counted.")
@click.option("--quick", is_flag=True, help="Four layers and a small vocabulary: 0.14 GiB.")
def main(engines: int, nodes: str, rounds: int, quick: bool) -> None:
    specs = qwen2_specs(4, 16384) if quick else qwen2_specs(24, 151936)
    for num_nodes in map(int, nodes.split(",")):
        setting = Setting(specs, num_nodes, engines, rounds)
        report(setting, measure(setting))


if __name__ == "__main__":
    main()
