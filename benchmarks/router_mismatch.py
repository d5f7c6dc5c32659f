"""How far engine and learner are apart where routers are near a tie, and what replay of the engine's experts changes.

`python benchmarks/router_mismatch.py --model experts --dtype bfloat16`, and `--model dense` beside it, after
`tools/setup.sh cpu,demo`. The models are those of `experts.py`, the prompts those of the demo's eval. The engine is a
run's vLLM engine with `train.router_replay`. It samples one completion at a time. The learner's model scores the same
tokens with its own experts, with the engine's, and with the engine's of one token earlier.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from common import load_average, print_table
from experts import write_models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config, load_config
from hpc_grpo.data.loading import load_evals
from hpc_grpo.data.tokenizer import load_tokenizer, stop_token_ids
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.engine.vllm import start_vllm
from hpc_grpo.learner.learner import mismatch
from hpc_grpo.learner.model import PolicyModel, load_policy
from hpc_grpo.learner.packing import pack
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.template.environment import prepare
from hpc_grpo.types import Episode, GroupRequest, GroupSamples, SamplingSpec, TrainSequence

METRICS = ("logprob_abs_diff_mean", "logprob_abs_diff_max", "kl")
HEADER = ("experts", "mean difference", "largest", "KL", "other experts chosen")


@click.command()
@click.option("--folder", default="runs/experts", type=click.Path(path_type=Path), show_default=True)
@click.option("--model", default="experts", type=click.Choice(["dense", "experts"]), show_default=True)
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float32"]), show_default=True)
@click.option("--prompts", default=32, type=click.IntRange(1, 32), show_default=True)
def main(folder: Path, model: str, dtype: str, prompts: int) -> None:
    """Sample with the engine, and print how far the learner's logprobs are from the engine's."""
    folder = folder.resolve()
    settings: dict[str, Any] = {"run.root": folder, "model.path": write_models(folder)[model], "model.dtype": dtype}
    # Threads that wait for each other are slow on cores that others use.
    settings |= {"train.router_replay": str(model == "experts").lower(), "engine.num_threads": 1}
    config = load_config("local/demo", [f"{key}={value}" for key, value in settings.items()])
    prepare("engine", config)
    sequences = sample(config, prompts)
    policy = load_policy(config, use_gradient_checkpointing=False)
    rows = [("its own", *apart(policy, sequences, [replace(own, experts=None) for own in sequences]))]
    if model == "experts":
        late = [replace(own, experts=np.roll(own.experts, 1, axis=0)) for own in sequences]
        rows.append(("the engine's", *apart(policy, sequences, sequences)))
        rows.append(("the engine's, a token late", *apart(policy, sequences, late)))
    tokens = sum(sequence.num_trained_tokens for sequence in sequences)
    print_table(f"{model}, {dtype}, nats of {tokens} sampled tokens; {load_average()}", HEADER, rows)


def sample(config: Config, num_prompts: int) -> list[TrainSequence]:
    """Return a completion of each prompt, with the engine's experts if the model is a mixture."""
    engine, tokenizer = start_vllm(config, on_gpu=False, reads_weights=True), load_tokenizer(config)
    sampler, stream = Sampler(engine, stop_token_ids(config, tokenizer)), load_evals(config, tokenizer)[""]
    spec = SamplingSpec(config.rollout.max_new_tokens)
    sequences: list[TrainSequence] = []
    for number in range(num_prompts):
        prompt = stream.prompt(number).token_ids
        [answer] = sampler.add([GroupRequest(number, prompt, (number,), spec)])
        while not answer.done():
            sampler.step()
        samples = GroupSamples(number, (Episode((answer.result().as_turn(prompt, starts_anew=True),), "stop"),))
        sequences += algorithm_of(config).sequences(samples, (1.0,), (True,))
    return sequences


def apart(
    policy: PolicyModel, sequences: Sequence[TrainSequence], replayed: Sequence[TrainSequence]
) -> tuple[str, ...]:
    """Return METRICS of `replayed`, and the share of a layer's tokens whose own choice is not that of `sequences`."""
    with policy.routers.recorded() as logits:
        found = merge([mismatch(policy, [pack(replayed)])])
    shown = tuple(f"{found[f'mismatch/{name}']:.2g}" for name in METRICS)
    if not logits:
        return *shown, ""
    theirs = torch.cat([torch.from_numpy(own.experts).long() for own in sequences])
    mine = torch.stack([layer.topk(theirs.shape[-1]).indices for layer in logits], dim=1)
    is_other = (mine.sort(dim=-1).values != theirs.sort(dim=-1).values).any(dim=-1)
    is_computed = torch.cat([torch.arange(len(own.token_ids)) < len(own.token_ids) - 1 for own in sequences])
    return *shown, f"{float(is_other[is_computed].float().mean()):.2%}"


if __name__ == "__main__":
    main()
