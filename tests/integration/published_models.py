"""Engines that get a learner's weights: `python -m tests.integration.published_models CONFIG` prints how far off they are.

The learner is in the process of the engine and publishes as in a run: through the node's store and group.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_grpo.config import load_config
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.engine.vllm import start_vllm
from hpc_grpo.template.environment import prepare
from tests.integration.crowded_engine import Answered, group_requests, sample

DEADLINE_S = 60.0


def main() -> None:
    config = load_config(sys.argv[1])
    for module in prepare("engine", config):
        importlib.import_module(module)
    from hpc_grpo.learner.learner import score_apart
    from hpc_grpo.learner.model import gathered, load_policy, parameter_specs
    from hpc_grpo.learner.publish import WeightPublisher
    from hpc_grpo.weights.node_group import GroupMembership, NodeGroup
    from hpc_grpo.weights.store import StoreSpec, WeightStore, bucket_layout

    engine = start_vllm(config, on_gpu=False)
    policy = load_policy(config, use_gradient_checkpointing=False)
    specs = [replace(spec, dtype=config.engine_dtype) for spec in parameter_specs(policy, config.model.dtype)]
    layout = bucket_layout(specs, 2**14)
    (differences,) = engine.collective_rpc("hpc_grpo_contract_differences", args=(layout,))
    report: dict[str, Any] = {"differences": differences}
    sampler, requests = (
        Sampler(engine, stop_token_ids=[1]),
        group_requests(config, policy.language_model.config.vocab_size),
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ThreadPoolExecutor() as threads:
        store = StoreSpec(layout, 7)
        publisher = WeightPublisher(
            layout, lambda names: gathered(policy, names), WeightStore(Path(folder), store, create=True)
        )
        member = GroupMembership(Path(folder), 0, 2, DEADLINE_S)
        forming = threads.submit(NodeGroup, member)
        engine.collective_rpc("hpc_grpo_join", args=(replace(member, rank=1), store))
        publisher.group = forming.result()

        def publish(version: int) -> None:
            publisher.stage(version)
            announcing = threads.submit(publisher.announce)
            engine.collective_rpc("hpc_grpo_receive", args=(version, None))
            announcing.result()
            sampler._switch_to(version)

        def distance() -> float:
            """Nats, the largest of a token, between what the engine samples with and what the learner does."""
            largest = 0.0
            for group in sample(sampler, requests[:4], lambda step: None):
                scored = score_apart(
                    policy, group.prompt_token_ids, [each.token_ids for each in group.completions], "cpu"
                )
                for own, each in zip(scored, group.completions, strict=True):
                    largest = max(largest, float(np.abs(own - each.engine_logprobs).max()))
            return largest

        publish(0)
        report["first"] = distance()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        report["withheld"] = distance()
        publish(2)
        report["second"] = distance()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
