"""One engine under pressure: `python -m tests.integration.crowded_engine CONFIG` prints its samples as JSON.

Many prompts, each longer than what is left of a step's tokens, with a KV cache too small for them: requests wait,
are preempted, and are computed anew. Which tokens are sampled must depend on a request and its seed alone. In a fork of
this process vLLM schedules a step ahead, as on GPUs, and the weights change under the requests in flight.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np

from hpc_grpo.config import Config, load_config
from hpc_grpo.data.stream import sampling_seed
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.engine.vllm import engine_options
from hpc_grpo.template.environment import prepare
from hpc_grpo.types import Completion, GroupRequest, SamplingSpec

NUM_PROMPTS, END = 16, 1
_STEPS_BETWEEN_INTERRUPTIONS = 16

Tokens = list[list[list[int]]]
"""Of each completion of each prompt."""


class Answered(NamedTuple):
    prompt_token_ids: tuple[int, ...]
    completions: list[Completion]


def group_requests(config: Config, vocabulary: int) -> list[GroupRequest]:
    """Prompts of random tokens, as long as the config allows, none with a prefix in common."""
    rng = np.random.default_rng(0)
    sampling = SamplingSpec(config.rollout.max_new_tokens)
    samples = range(config.rollout.group_size)
    return [
        GroupRequest(
            ordinal,
            tuple(int(token) for token in rng.integers(2, vocabulary, config.data.max_prompt_tokens)),
            tuple(sampling_seed(0, ordinal, sample, 0) for sample in samples),
            sampling,
        )
        for ordinal in range(NUM_PROMPTS)
    ]


def start_engine(config: Config, **more: Any) -> Any:
    """The engine of a run, with the model's own weights instead of a learner's."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options = {**engine_options(config, on_gpu=False), "load_format": "auto", **more}
    return LLMEngine.from_engine_args(EngineArgs(**options), enable_multiprocessing=False)


def asked(request: GroupRequest) -> list[GroupRequest]:
    return [replace(request, seeds=(seed,)) for seed in request.seeds]


def sample(sampler: Sampler, requests: list[GroupRequest], between_steps: Callable[[int], None]) -> list[Answered]:
    futures = sampler.add([one for request in requests for one in asked(request)])
    num_steps = 0
    while sampler.has_work():
        sampler.step()
        num_steps += 1
        between_steps(num_steps)
    answers = iter(futures)
    return [Answered(request.prompt_token_ids, [next(answers).result() for _ in request.seeds]) for request in requests]


def refusal(sampler: Sampler, request: GroupRequest) -> BaseException | None:
    return sampler.add(asked(request))[0].exception(timeout=0)


def tokens_of(groups: list[Answered]) -> Tokens:
    return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]


def largest_logprob_difference(
    model_path: str, groups: list[Answered], forbidden: Sequence[int] = (), factor: float = 1.0
) -> float:
    """Between the engine and transformers, which is not to sample the `forbidden` tokens, in nats.

    Each version of the weights scales logits by `factor` more.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    largest = 0.0
    for group in groups:
        for completion in group.completions:
            tokens = torch.tensor(np.concatenate([group.prompt_token_ids, completion.token_ids])).long()[None]
            with torch.no_grad():
                logits = model(tokens).logits[0, :-1]
            logits[:, list(forbidden)] = -torch.inf
            logits[-len(completion.token_ids) :] *= factor ** torch.from_numpy(completion.policy_versions)[:, None]
            logprobs = logits.log_softmax(-1)
            own = logprobs.gather(-1, tokens[0, 1:, None])[-len(completion.token_ids) :, 0].numpy()
            largest = max(largest, float(np.abs(own - completion.engine_logprobs).max()))
    return largest


def schedule_ahead() -> None:
    """Have vLLM schedule a step ahead on CPU, where it refuses to; streams and events of CUDA do nothing."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    refuse = CpuPlatform.check_and_update_config

    def allow(vllm_config: Any) -> None:
        refuse(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(allow)
    torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = MagicMock
    torch.cuda.stream = nullcontext


def scale_logits(worker: Any, factor: float) -> None:
    """Change the weights of a worker: those of its last norm, on which all logits depend linearly."""
    worker.model_runner.get_model().model.norm.weight.data.mul_(factor)


def report_ahead(config: Config) -> dict[str, Any]:
    schedule_ahead()
    engine = start_engine(config)
    sampler = Sampler(engine, stop_token_ids=[END])
    requests = group_requests(config, engine.model_config.get_vocab_size())
    in_flight = engine.engine_core.engine_core.batch_queue
    most_in_flight, factor, version = 0, 0.5, 0

    def publish(step: int) -> None:
        nonlocal most_in_flight, version
        most_in_flight = max(most_in_flight, len(in_flight))
        if step % _STEPS_BETWEEN_INTERRUPTIONS == 0 and version < 3:
            sampler.drain()
            assert not in_flight
            engine.collective_rpc(scale_logits, args=(factor,))
            version += 1
            sampler._switch_to(version)

    report: dict[str, Any] = {"crowd": tokens_of(sample(sampler, requests, lambda step: None))}
    changing = sample(sampler, requests, publish)
    report["versions"] = sorted(
        {int(v) for group in changing for each in group.completions for v in each.policy_versions}
    )
    report["most_in_flight"] = most_in_flight
    report["logprob_difference"] = largest_logprob_difference(config.model.path, changing, factor=factor)
    return report


def main() -> None:
    config = load_config(sys.argv[1])
    for module in prepare("engine", config):
        importlib.import_module(module)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    ahead = multiprocessing.get_context("fork").Process(target=lambda: sender.send(report_ahead(config)))
    ahead.start()
    sender.close()
    engine = start_engine(config)
    scheduler = engine.engine_core.engine_core.scheduler
    num_preemptions = 0
    preempt = scheduler._preempt_request

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal num_preemptions
        num_preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = count
    sampler = Sampler(engine, stop_token_ids=[END])
    requests = group_requests(config, engine.model_config.get_vocab_size())

    def interrupt(step: int) -> None:
        """Do to the requests in flight what a publish does."""
        if step % _STEPS_BETWEEN_INTERRUPTIONS == 0:
            sampler.forget_prefixes()

    crowd = sample(sampler, requests, lambda step: None)
    report: dict[str, Any] = {"preemptions": num_preemptions, "crowd": tokens_of(crowd)}
    report["interrupted"] = tokens_of(sample(sampler, requests, interrupt))
    report["backwards"] = tokens_of(sample(sampler, requests[::-1], lambda step: None)[::-1])
    report["alone"] = [tokens_of(sample(sampler, [request], lambda step: None))[0] for request in requests]
    report["refused"] = [str(refusal(sampler, replace(requests[0], prompt_token_ids=ids))) for ids in ((), (999,))]
    report["after_refusals"] = tokens_of(sample(sampler, requests[:1], lambda step: None))
    sampler.sleep()
    report["sleeps"] = engine.is_sleeping()
    sampler.wake_up()
    report["after_sleep"] = tokens_of(sample(sampler, requests[:1], lambda step: None))
    report["logprob_difference"] = largest_logprob_difference(config.model.path, crowd)
    endless = replace(requests[0], sampling=SamplingSpec(config.rollout.max_new_tokens, config.rollout.max_new_tokens))
    groups = sample(sampler, [endless], lambda step: None)
    report["endless"] = tokens_of(groups)
    report["endless_difference"] = largest_logprob_difference(config.model.path, groups)
    report["endless_difference_without_end"] = largest_logprob_difference(config.model.path, groups, [END])
    report["ahead"] = receiver.recv()
    ahead.join()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
