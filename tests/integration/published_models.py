"""An engine that gets a learner's weights: `python -m tests.integration.published_models CONFIG` compares the two.

The learner is in the process of the engine and publishes as in a run: through the node's store and group.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hpc_grpo.config import load_config
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.engine.vllm import start_vllm
from hpc_grpo.learner.learner import score_apart
from hpc_grpo.learner.model import gathered, load_policy, parameter_specs
from hpc_grpo.learner.publish import WeightPublisher
from hpc_grpo.template.environment import prepare
from hpc_grpo.weights.node_group import GroupMembership, NodeGroup
from hpc_grpo.weights.store import StoreSpec, WeightStore, bucket_layout
from tests.integration.crowded_engine import END, group_requests, sample

_KEY, _BUCKET_BYTES, _CHANGE = 7, 2**14, 0.2


def main() -> None:
    config = load_config(sys.argv[1])
    for module in prepare("engine", config):
        with suppress(ImportError):  # a template, too, leaves it to vLLM
            importlib.import_module(module)
    engine = start_vllm(config, on_gpu=False)
    policy = load_policy(config, use_gradient_checkpointing=False)
    specs = [replace(spec, dtype=config.engine_dtype) for spec in parameter_specs(policy, config.model.dtype)]
    layout = bucket_layout(specs, _BUCKET_BYTES)
    (differences,) = engine.collective_rpc("hpc_grpo_contract_differences", args=(layout,))
    sampler, requests = Sampler(engine, stop_token_ids=[END]), group_requests(config, 50)[:4]
    withheld: dict[str, torch.Tensor] = {}

    @contextmanager
    def gather(names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Give the policy's parameters; of the experts in `withheld` the first as it was."""
        with gathered(policy, names) as weights:
            old = {name: torch.cat([withheld[name][:1], weights[name][1:]]) for name in names if name in withheld}
            yield {**weights, **old}

    def farthest() -> tuple[float, float]:
        """Return the nats by which a token's logprob is off: the most, and the mean of the farthest completion."""
        groups = sample(sampler, requests, lambda step: None)
        off = [
            np.abs(scored - own.engine_logprobs)
            for group in groups
            for own, scored in zip(
                group.completions,
                score_apart(policy, group.prompt_token_ids, [own.token_ids for own in group.completions], "cpu"),
                strict=True,
            )
        ]
        return max(float(each.max()) for each in off), max(float(each.mean()) for each in off)

    def other_experts() -> float:
        """Return the share of a layer's tokens whose experts are not the policy's, sampled at once with preemptions."""
        other, num = 0, 0
        for group in sample(sampler, requests, lambda step: sampler.forget_prefixes() if step % 5 == 0 else None):
            for own in group.completions:
                with policy.routers.recorded() as logits:
                    score_apart(policy, group.prompt_token_ids, [own.token_ids], "cpu")
                mine = torch.stack([layer.topk(2).indices for layer in logits], dim=1)[:-1].sort(dim=-1).values
                theirs = torch.from_numpy(own.experts).long().sort(dim=-1).values
                other, num = other + int((mine != theirs).any(dim=-1).sum()), num + mine[..., 0].numel()
        return other / num

    def change() -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.0 + _CHANGE * torch.randn_like(parameter))

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ThreadPoolExecutor() as threads:
        spec, member = StoreSpec(layout, _KEY), GroupMembership(Path(folder), 0, 2, config.deadlines.publish_s)
        publisher = WeightPublisher(layout, gather, WeightStore(Path(folder), spec, create=True))
        forming = threads.submit(NodeGroup, member)
        engine.collective_rpc("hpc_grpo_join", args=(replace(member, rank=1), spec))
        publisher.group = forming.result()

        def publish(version: int) -> None:
            publisher.stage(version)
            announcing = threads.submit(publisher.announce)
            engine.collective_rpc("hpc_grpo_receive", args=(version, None))
            announcing.result()
            sampler._switch_to(version)

        publish(0)
        report = {"differences": differences, "first": farthest()}
        change()
        report["not published"] = farthest()
        publish(1)
        report["second"] = farthest()
        if config.train.router_replay:
            report["other experts"] = other_experts()
        experts = [name for name, _ in policy.hf_named_parameters() if ".0.mlp.experts." in name]
        with gathered(policy, experts) as weights:
            withheld |= {name: weight.clone() for name, weight in weights.items()}
        change()
        publish(2)
        report["expert withheld" if experts else "third"] = farthest()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
