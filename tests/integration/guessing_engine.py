"""An engine with guesses (`speculative_config`) or, for 0, without: prints what it sampled and how likely that was.

`python -m tests.integration.guessing_engine CONFIG TOKENS TEMPERATURE`: greedy completions of prompts that repeat
themselves, the logprobs of random ones, and for one prompt how often each completion of six tokens was drawn. The
config refuses guesses on CPU, where vLLM 0.32 has a fault; it is mended here, so that all else is shown to be right.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import numpy as np

from hpc_grpo.config import Config, load_config
from hpc_grpo.data.stream import sampling_seed
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.types import GroupRequest, SamplingSpec
from tests.integration.crowded_engine import Answered, sample, start_engine, tokens_of

NUM_DRAWS, DRAWN_TOKENS = 2048, 6


def repeating_prompts(config: Config, vocabulary: int, count: int) -> list[tuple[int, ...]]:
    """Prompts of a few random tokens over and over, so that much is guessed."""
    rng = np.random.default_rng(1)
    periods = [rng.integers(2, vocabulary, 5 + index % 4).tolist() for index in range(count)]
    return [tuple((period * 40)[: config.data.max_prompt_tokens]) for period in periods]


def requests_of(prompts: list[tuple[int, ...]], size: int, sampling: SamplingSpec) -> list[GroupRequest]:
    return [
        GroupRequest(ordinal, prompt, tuple(sampling_seed(0, ordinal, index, 0) for index in range(size)), sampling)
        for ordinal, prompt in enumerate(prompts)
    ]


def mend_expand() -> None:
    """Have vLLM's stand-in for `expand_kernel` fill the tensor that it is given, and not a copy in int64."""
    import torch
    from vllm.utils import cpu_triton_utils

    def expand(output: Any, given: Any, ends: Any, replace_from: int, replace_to: int, *_: int) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        output.copy_(torch.where(given == replace_from, replace_to, given).repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


class Scorer:
    """Logprobs by transformers, in float32."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def logprobs(self, tokens: Any, temperature: float) -> Any:
        """Return those of every next token, `[L, V]`."""
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor(np.asarray(tokens)).long()[None]).logits[0]
        return (logits / temperature).log_softmax(-1).numpy()

    def largest_difference(self, groups: list[Answered], temperature: float) -> float:
        largest = 0.0
        for group in groups:
            for completion in group.completions:
                every = np.concatenate([group.prompt_token_ids, completion.token_ids])
                own = self.logprobs(every[:-1], temperature)[len(group.prompt_token_ids) - 1 :]
                own = own[np.arange(len(completion.token_ids)), completion.token_ids]
                largest = float(np.maximum(largest, np.abs(own - completion.engine_logprobs).max()))  # a nan stays
        return largest


def main() -> None:
    config, num_tokens, temperature = load_config(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    mend_expand()
    guesses = {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    engine = start_engine(config, **({"speculative_config": guesses} if num_tokens else {}))
    sampler = Sampler(engine, stop_token_ids=[1])
    num_steps = 0

    def count(_: int) -> None:
        nonlocal num_steps
        num_steps += 1

    prompts = repeating_prompts(config, engine.model_config.get_vocab_size(), 12)
    longest = config.rollout.max_new_tokens
    greedy = sample(sampler, requests_of(prompts, 1, SamplingSpec(longest, temperature=0.0)), count)
    report: dict[str, Any] = {"greedy": tokens_of(greedy), "greedy_steps": num_steps}
    crowd = sample(sampler, requests_of(prompts, 4, SamplingSpec(longest, temperature=temperature)), lambda _: None)
    scorer = Scorer(config.model.path)
    report["logprob_difference"] = scorer.largest_difference(crowd, temperature)
    draws = sample(
        sampler, requests_of(prompts[:1], NUM_DRAWS, SamplingSpec(DRAWN_TOKENS, temperature=temperature)), count
    )
    report["steps"] = num_steps
    counts = Counter(tuple(completion.token_ids.tolist()) for completion in draws[0].completions)
    report["draws"] = [[*tokens, number] for tokens, number in counts.items()]
    report["expected"] = expected(scorer, prompts[0], counts, temperature)
    print(json.dumps(report))


def expected(scorer: Scorer, prompt: tuple[int, ...], counts: Counter[tuple[int, ...]], temperature: float) -> Any:
    """Return the probability of each completion that was drawn."""
    found = []
    for tokens in counts:
        own = scorer.logprobs([*prompt, *tokens[:-1]], temperature)[len(prompt) - 1 :]
        found.append(float(np.exp(own[np.arange(len(tokens)), list(tokens)].sum())))
    return found


if __name__ == "__main__":
    main()
