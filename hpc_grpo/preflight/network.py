"""Judge nodes against each other and the network between them: pure functions of facts and replies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_grpo.preflight.findings import MAX_NAMED_NODES, Finding, failure, ok, skipped, warning
from hpc_grpo.preflight.node_facts import NodeFacts

_MAX_SKEW_S = 10.0
_LARGE_SKEW_S = 1.0
_LEAST_GLOO_GB_PER_S = 0.1
_LEAST_NCCL_GB_PER_S = 5.0
_NETWORK_LINE = re.compile(r"NCCL INFO .*?Using network (\S.*?)\s*$")
_MAX_NAMED_PACKAGES = 4


@dataclass(frozen=True)
class Measured:
    """What the torch probe of a node measured. `nccl_library` and `nccl_plugin` are the loaded files; "" for none."""

    sees_gpus: int = 0
    gloo_gb_per_s: float | None = None
    nccl_gb_per_s: float | None = None
    nccl_network: str = ""
    error: str = ""
    nccl_version: str = ""
    nccl_library: str = ""
    nccl_plugin: str = ""


def canary(written_by: str, root: str, sees: Mapping[str, bool]) -> Finding:
    """Check that every node can read a file that the first node wrote in the run folder."""
    if blind := [node for node, sees_it in sees.items() if not sees_it]:
        says = f"{', '.join(blind)} cannot read what {written_by} wrote in {root}"
        return failure(says, "set run.root to a folder on a file system that all nodes share")
    return ok(f"a file written by {written_by} is read by {', '.join(sees) or 'no other node'}")


def clocks(offsets_s: Mapping[str, float]) -> Finding:
    """Check that clocks agree. `offsets_s` are the nodes' clocks minus this machine's clock."""
    skew_s = max(offsets_s.values()) - min(offsets_s.values())
    says = f"clocks differ by {skew_s:.1f} s"
    if skew_s > _LARGE_SKEW_S:
        middle = sorted(offsets_s.values())[len(offsets_s) // 2]
        node = max(offsets_s, key=lambda name: abs(offsets_s[name] - middle))
        says += f" ({node} is {offsets_s[node]:+.1f} s off)"
    if skew_s > _MAX_SKEW_S:
        return failure(says, "tell your site (time synchronisation); until then, exclude the node")
    if skew_s > _LARGE_SKEW_S:
        return warning(says, "tell your site: the end of the job is judged by the node's clock")
    return ok(says)


def versions(facts: Sequence[NodeFacts]) -> Finding:
    """Check that all nodes have the same packages."""
    names = sorted({name for node in facts for name in node.versions})
    differing = [name for name in names if len({node.versions.get(name) for node in facts}) > 1]
    if differing:
        shown = facts[:MAX_NAMED_NODES]
        lines = [
            f"{name}: " + ", ".join(f"{node.node} has {node.versions.get(name, 'none')}" for node in shown)
            for name in differing[:_MAX_NAMED_PACKAGES]
        ]
        fix = "install hpc-grpo once, on a file system that all nodes share, and submit with its Python"
        return failure("; ".join(lines), fix)
    packages = [f"{name} {facts[0].versions[name]}" for name in names if name != "numpy"]
    nodes = {1: "one node", 2: "both nodes"}.get(len(facts), f"all {len(facts)} nodes")
    return ok(f"equal on {nodes}: {', '.join(packages)}")


def gloo(measured: Mapping[str, Measured]) -> Finding:
    """Judge the bandwidth of an all-reduce over Gloo; the slowest node counts."""
    fix = "check launch.interface, and the site's firewall between nodes"
    if len(measured) == 1:
        return skipped("one node")
    if broken := {node: found for node, found in measured.items() if not found.gloo_gb_per_s}:
        return failure(_errors(broken, "it measured nothing"), fix)
    slowest = min(found.gloo_gb_per_s or 0.0 for found in measured.values())
    says = f"all-reduce at {slowest:.2f} GB/s between {len(measured)} nodes"
    return warning(says, fix) if slowest < _LEAST_GLOO_GB_PER_S else ok(says)


def torch_gpus(measured: Mapping[str, Measured], num_gpus: Mapping[str, int]) -> Finding:
    """Check that torch can use the GPUs that nvidia-smi lists: `num_gpus` of each node."""
    if not any(num_gpus.values()):
        return skipped("no GPU was seen")
    blind = [
        f"{node}: {found.error or f'torch sees {found.sees_gpus} of {num_gpus[node]} GPUs'}"
        for node, found in measured.items()
        if found.sees_gpus < num_gpus[node]
    ]
    if blind:
        fix = "see the check of cuda; python -c 'import torch; torch.cuda.init()' on the node says more"
        return failure("; ".join(blind[:MAX_NAMED_NODES]), fix)
    return ok("torch sees all GPUs")


def nccl_library(measured: Mapping[str, Measured]) -> Finding:
    """Name NCCL's version, library and plugin, and check that all nodes have the same."""
    found = {node: _nccl_in_words(each, is_alone=len(measured) == 1) for node, each in measured.items()}
    if not any(each.nccl_version for each in measured.values()):
        return skipped("none: this torch is built without NCCL")
    if len(set(found.values())) > 1:
        fix = "give all nodes the same modules (launch.modules) and LD_LIBRARY_PATH (launch.env)"
        return failure("; ".join([f"{node}: {words}" for node, words in found.items()][:MAX_NAMED_NODES]), fix)
    return ok(next(iter(found.values())))


def _nccl_in_words(found: Measured, *, is_alone: bool) -> str:
    if not found.nccl_version:
        return found.error or "no NCCL"
    plugin = found.nccl_plugin or ("not loaded on one node" if is_alone else "none")
    return f"{found.nccl_version} in {found.nccl_library or 'torch itself'}; network plugin: {plugin}"


def nccl(measured: Mapping[str, Measured], wanted_network: str | None) -> Finding:
    """Judge NCCL's bandwidth with one GPU per node, and its network. `wanted_network` is NCCL_NET of launch.env."""
    if not any(found.sees_gpus for found in measured.values()):
        return skipped("torch sees no GPU")
    if len(measured) == 1:
        return skipped("one node")
    if broken := {node: found for node, found in measured.items() if not found.nccl_gb_per_s}:
        fix = "load the site's NCCL modules (launch.modules); see NCCL_DEBUG=INFO"
        return failure(_errors(broken, "no result"), fix)
    networks = {found.nccl_network or "an unknown network" for found in measured.values()}
    slowest = min(found.nccl_gb_per_s or 0.0 for found in measured.values())
    says = f"all-reduce at {slowest:.1f} GB/s over {', '.join(sorted(networks))} with one GPU of each node"
    plugin = "load the site's NCCL plugin (launch.modules) and name it in launch.env as NCCL_NET"
    if len(networks) > 1 or (wanted_network and networks != {wanted_network}):
        expected = f", but NCCL_NET is {wanted_network}" if wanted_network else ""
        return failure(f"{says}{expected}", plugin)
    if networks == {"Socket"} or slowest < _LEAST_NCCL_GB_PER_S:
        return warning(f"{says}: NCCL may have fallen back to TCP", plugin)
    return ok(says)


def nccl_network(log: Sequence[str]) -> str:
    """Return the network that NCCL's log names; "" if it names none.

    >>> nccl_network(["n1:7:9 [0] NCCL INFO Using network AWS Libfabric"])
    'AWS Libfabric'
    """
    found = [match[1] for line in log if (match := _NETWORK_LINE.search(line))]
    return found[-1] if found else ""


def _errors(measured: Mapping[str, Measured], without_error: str) -> str:
    lines = [f"{node}: {found.error or without_error}" for node, found in measured.items()]
    return "; ".join(lines[:MAX_NAMED_NODES])
