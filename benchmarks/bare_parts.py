"""The two halves of a GRPO step on their own, as fast as they go: vLLM generates, torch trains.

A helper of vs_trl.py, which runs it in a process of its own for every measurement and adds the two times up:
`bare_parts.py MODEL generate SHAPE`, `bare_parts.py MODEL train SHAPE`; SHAPE is JSON. Prints JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from common import median

PADDED, PACKED = "padded", "packed"
PROMPT = "What is {}+{}?\n"


def prompts(num_prompts: int) -> list[str]:
    return [PROMPT.format(10 + index, 99 - index) for index in range(num_prompts)]


def timed(step: Callable[[], object], num_steps: int) -> float:
    """Median seconds of a step, after one that does not count."""
    seconds = []
    for _ in range(num_steps + 1):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def generate(model: str, shape: dict[str, Any]) -> dict[str, float]:
    """Return the seconds for one engine's share: all tokens of its prompts, with their logprobs, in one batch."""
    from vllm import LLM, SamplingParams

    # Logprobs of the tokens sampled are part of the job; bookkeeping, seeds and end tokens are not.
    sampling = SamplingParams(
        max_tokens=shape["tokens"], ignore_eos=True, n=1, logprobs=0, flat_logprobs=True, detokenize=False
    )
    options = {**shape["engine_options"], "load_format": "auto", "skip_tokenizer_init": False}
    del options["worker_extension_cls"]
    engine = LLM(**options)
    tokenizer = engine.get_tokenizer()
    batch = [
        {"prompt_token_ids": tokenizer.encode(prompt)}
        for prompt in prompts(shape["prompts"])
        for _ in range(shape["group"])
    ]
    # Gathered at a common start, since engines of one node compute side by side.
    Path(shape["barrier"]).mkdir(exist_ok=True)
    _meet(Path(shape["barrier"]), shape["index"], shape["engines"])
    return {"seconds": timed(lambda: engine.generate(batch, sampling, use_tqdm=False), shape["steps"])}


def _meet(folder: Path, index: int, count: int) -> None:
    (folder / str(index)).touch()
    while len(list(folder.iterdir())) < count:
        time.sleep(0.02)


def train(model: str, shape: dict[str, Any]) -> dict[str, float]:
    """Return the seconds for forward, backward and AdamW over all sequences, in microbatches as asked for."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(shape["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = [tokenizer.encode(prompt) for prompt in prompts(shape["prompts"]) for _ in range(shape["group"])]
    completions = torch.randint(2, len(tokenizer), (len(encoded), shape["tokens"]))
    make_step = {PADDED: _padded_step, PACKED: _packed_step}[shape["kind"]]
    return {"seconds": timed(make_step(model, encoded, completions, shape["size"]), shape["steps"])}


def _padded_step(model: str, encoded: Sequence[list[int]], completions: Any, rows: int) -> Callable[[], None]:
    """Compute the model as transformers has it, over prompts padded to one length."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    pad = AutoTokenizer.from_pretrained(model).pad_token_id
    longest, tokens = max(map(len, encoded)), completions.shape[1]
    padded = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in encoded])
    input_ids = torch.cat([padded, completions], dim=1)
    mask = torch.cat([padded != pad, torch.ones_like(completions, dtype=torch.bool)], dim=1).long()
    is_padded = bool((mask == 0).any())

    def step() -> None:
        for start in range(0, len(input_ids), rows):
            part, own_mask = input_ids[start : start + rows], mask[start : start + rows]
            logits = policy(part, attention_mask=own_mask if is_padded else None, logits_to_keep=tokens + 1).logits
            flat = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = functional.cross_entropy(flat, part[:, -tokens:].reshape(-1), reduction="sum")
            (loss / completions.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _packed_step(model: str, encoded: Sequence[list[int]], completions: Any, budget: int) -> Callable[[], None]:
    """hpc_grpo's model and packing without DeepSpeed, Ray or metrics."""
    import torch

    from hpc_grpo.algorithms.tasks import demonstration_sequence
    from hpc_grpo.config import Config
    from hpc_grpo.config.resources import Budget
    from hpc_grpo.learner.model import load_policy
    from hpc_grpo.learner.packing import pack
    from hpc_grpo.learner.split import split_microbatches
    from hpc_grpo.types import Demonstration

    settings = {
        "run": {"name": "bare"},
        "model": {"path": model, "dtype": "float32", "device": "cpu"},
        "data": {"train": {"path": "unused"}, "max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": completions.shape[1]},
        "train": {"total_steps": 1, "max_tokens_per_microbatch": budget},
    }
    policy = load_policy(Config.model_validate(settings), use_gradient_checkpointing=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    pairs = enumerate(zip(encoded, completions.tolist(), strict=True))
    sequences = [demonstration_sequence(Demonstration(index, 0, tuple(ids), tuple(row))) for index, (ids, row) in pairs]
    batches = [pack(group) for group in split_microbatches(sequences, Budget(budget))]

    def step() -> None:
        for batch in batches:
            logprobs, _ = policy(batch)
            (-logprobs.sum() / completions.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@click.command()
@click.argument("model")
@click.argument("half", type=click.Choice(["generate", "train"]))
@click.argument("shape")
def main(model: str, half: str, shape: str) -> None:
    measure = {"generate": generate, "train": train}[half]
    print(json.dumps(measure(model, json.loads(shape))))


if __name__ == "__main__":
    main()
