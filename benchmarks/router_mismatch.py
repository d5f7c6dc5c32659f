"""How far engine and learner are apart where routers are near a tie, and what replay of the engine's experts changes.

`python benchmarks/router_mismatch.py --model experts --dtype bfloat16`, and `--model dense` beside it, after
`tools/setup.sh cpu,demo`. The models are those of `experts.py`, the prompts those of the demo's eval. The engine is a
run's vLLM engine. It samples one completion at a time. Its routers give the experts of each token to a function in this
process. vLLM offers that on CPUs too, but does not add the experts to a completion there. The learner's model scores
the same tokens with its own experts, with the engine's, and with the engine's of one token earlier.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from common import load_average, print_table
from experts import write_models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_grpo.config import Config, load_config
from hpc_grpo.data.loading import load_evals
from hpc_grpo.data.tokenizer import load_tokenizer, stop_token_ids
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.engine.vllm import start_vllm
from hpc_grpo.learner.experts import Routers
from hpc_grpo.learner.learner import mismatch
from hpc_grpo.learner.model import PolicyModel, load_policy
from hpc_grpo.learner.packing import pack
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.template.environment import prepare
from hpc_grpo.types import GroupRequest, SamplingSpec, TrainSequence
from tests.support.sequences import ordinary_sequence

METRICS = ("logprob_abs_diff_mean", "logprob_abs_diff_max", "kl")
HEADER = ("experts", "mean difference", "largest", "KL", "other experts chosen")
_NONE = -1
"""In place of the experts of a sequence's last token, which the engine samples and does not compute."""


@click.command()
@click.option("--folder", default="runs/experts", type=click.Path(path_type=Path), show_default=True)
@click.option("--model", default="experts", type=click.Choice(["dense", "experts"]), show_default=True)
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float32"]), show_default=True)
@click.option("--prompts", default=32, type=click.IntRange(1, 32), show_default=True)
def main(folder: Path, model: str, dtype: str, prompts: int) -> None:
    """Sample with the engine, and print how far the learner's logprobs are from the engine's."""
    folder = folder.resolve()
    settings: dict[str, Any] = {"run.root": folder, "model.path": write_models(folder)[model], "model.dtype": dtype}
    # Routers do not see cached tokens. Threads that wait for each other are slow on cores that others use.
    settings |= {"engine.vllm.enable_prefix_caching": "false", "engine.num_threads": 1}
    config = load_config("local/demo", [f"{key}={value}" for key, value in settings.items()])
    prepare("engine", config)
    sequences, experts = sample(config, prompts)
    policy = load_policy(config, use_gradient_checkpointing=False)
    rows = [("its own", *apart(policy, sequences, experts, replayed=None))]
    if experts:
        late = [own.roll(1, dims=0) for own in experts]
        rows.append(("the engine's", *apart(policy, sequences, experts, experts)))
        rows.append(("the engine's, a token late", *apart(policy, sequences, experts, late)))
    tokens = sum(sequence.num_trained_tokens for sequence in sequences)
    print_table(f"{model}, {dtype}, nats of {tokens} sampled tokens; {load_average()}", HEADER, rows)


def sample(config: Config, num_prompts: int) -> tuple[list[TrainSequence], list[Any]]:
    """Return a completion of each prompt, and the experts `[tokens, layers, k]` of each; none of a dense model."""
    engine, tokenizer = start_vllm(config, on_gpu=False, reads_weights=True), load_tokenizer(config)
    chosen: list[list[Any]] = []  # of each layer, the experts `[tokens, k]` of each pass

    def watch(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "routed_experts"):
                chosen.append([])
                module.router.set_capture_fn(lambda ids, own=chosen[-1]: own.append(ids.long().clone()))

    engine.apply_model(watch)
    sampler, stream = Sampler(engine, stop_token_ids(config, tokenizer)), load_evals(config, tokenizer)[""]
    spec = SamplingSpec(config.rollout.max_new_tokens)
    sequences, experts = [], []
    for number in range(num_prompts):
        for own in chosen:
            own.clear()
        prompt = stream.prompt(number).token_ids
        [answer] = sampler.add([GroupRequest(number, prompt, (number,), spec)])
        while not answer.done():
            sampler.step()
        token_ids, logprobs = answer.result().token_ids, answer.result().engine_logprobs
        sequences.append(ordinary_sequence(number, 0, [*prompt, *token_ids], len(token_ids), logprobs))
        if chosen:
            computed = torch.stack([torch.cat(own) for own in chosen], dim=1)
            experts.append(torch.cat([computed, torch.full_like(computed[-1:], _NONE)]))
    return sequences, experts


def apart(
    policy: PolicyModel, sequences: Sequence[TrainSequence], experts: Sequence[Any], replayed: Sequence[Any] | None
) -> tuple[str, ...]:
    """Return METRICS, and the share of a layer's tokens whose experts are not the engine's `experts`."""
    with routed(policy, None if replayed is None else torch.cat([*replayed])) as own:
        found = merge([mismatch(policy, [pack(sequences)])])
    shown = tuple(f"{found[f'mismatch/{name}']:.2g}" for name in METRICS)
    if not experts:
        return *shown, ""
    theirs, mine = torch.cat([*experts]), torch.stack(own, dim=1)
    is_other = (mine.sort(dim=-1).values != theirs.sort(dim=-1).values).any(dim=-1)[theirs[:, 0, 0] != _NONE]
    return *shown, f"{float(is_other.float().mean()):.2%}"


@contextmanager
def routed(policy: PolicyModel, experts: Any) -> Iterator[list[Any]]:
    """Yield the routers' own choices `[T, k]` by layer. If given, `experts` `[T, layers, k]` replaces them."""
    own: list[Any] = []

    def choose(layer: int, router: Any, inputs: Any, output: Any) -> Any:
        logits, _, chosen = output
        own.append(chosen)
        if experts is None:
            return output
        forced = torch.where(experts[:, layer] == _NONE, chosen, experts[:, layer])
        weights = logits.softmax(dim=-1).gather(1, forced)
        return logits, weights / weights.sum(dim=-1, keepdim=True), forced

    routers = enumerate(Routers(policy.language_model).modules)
    handles = [router.register_forward_hook(partial(choose, layer)) for layer, router in routers]
    yield own
    for handle in handles:
        handle.remove()


if __name__ == "__main__":
    main()
