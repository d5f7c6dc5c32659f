"""vLLM, token in and token out: groups of requests become groups of completions with versions and logprobs.

Consumes GroupRequests and weight updates; produces GroupSamples. Not thread-safe: a StepLoop owns it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from hpc_grpo.types import Completion, GroupRequest, GroupSamples, SamplingSpec
from hpc_grpo.weights.buckets import BucketPlan
from hpc_grpo.weights.node_group import GroupMembership
from hpc_grpo.weights.refusal import unrefused
from hpc_grpo.weights.store import StoreSpec

if TYPE_CHECKING:
    from hpc_grpo.types import Int32Array


@dataclass
class _PendingGroup:
    request: GroupRequest
    future: Future[GroupSamples]
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass
class _PendingSample:
    """`segments` are (policy_version, tokens sampled by it), closed at each weight update."""

    group: _PendingGroup
    index: int
    segments: list[tuple[int, int]] = field(default_factory=list)


class Sampler:
    """An in-process vLLM engine with the bookkeeping of groups and policy versions."""

    def __init__(self, engine_args: EngineArgs, stop_token_ids: Sequence[int]) -> None:
        self._engine = LLMEngine.from_engine_args(engine_args, enable_multiprocessing=False)
        self._stop_token_ids = list(stop_token_ids)
        self._samples: dict[str, _PendingSample] = {}
        self._request_ids = itertools.count()
        self._failure: BaseException | None = None
        self.policy_version = 0

    def has_work(self) -> bool:
        return bool(self._samples)

    def add_groups(self, requests: Sequence[GroupRequest]) -> list[Future[GroupSamples]]:
        """Queue groups in the order given; the order decides the batches and so the last bits of the numbers."""
        self._check_well()
        return [self._add_group(request) for request in requests]

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._finish(output)

    def fail(self, error: BaseException) -> None:
        """Give every group that waits this error, and later calls too: vLLM may be in any state now."""
        self._failure = error
        waiting = {id(sample.group): sample.group for sample in self._samples.values()}
        self._samples.clear()
        for group in waiting.values():
            group.future.set_exception(error)

    def contract_differences(self, plan: BucketPlan) -> list[str]:
        """What each worker finds different between the plan and its model."""
        return [line for lines in self._on_workers("hg_contract_differences", plan) for line in lines]

    def join_weight_group(self, membership: GroupMembership, store: StoreSpec) -> None:
        self._on_workers("hg_join", membership, store)

    def receive_weights(self, version: int) -> None:
        """Take part in the publish of `version`; requests in flight go on with the new weights.

        Raises what a step before it raised.
        """
        self._check_well()
        self._on_workers("hg_receive", version)
        self._switch_to(version)

    def load_stored_weights(self) -> None:
        """Load what the node's other engines hold."""
        self._switch_to(self._on_workers("hg_load_stored")[0])

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; requests in flight start over from their tokens."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _check_well(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _on_workers(self, method: str, *args: Any) -> list[Any]:
        return unrefused(self._engine.collective_rpc(method, args=args))

    def _switch_to(self, version: int) -> None:
        running = self._engine.output_processor.request_states
        for state in running.values():
            sample = self._samples[state.external_req_id]
            self._close_segment(sample, state.detokenizer.num_output_tokens())
        # Cached keys and values are those of the old weights.
        self.forget_prefixes()
        self.policy_version = version

    def _add_group(self, request: GroupRequest) -> Future[GroupSamples]:
        group = _PendingGroup(request, Future())
        for index, seed in enumerate(request.seeds):
            request_id = str(next(self._request_ids))
            self._samples[request_id] = _PendingSample(group, index)
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            self._engine.add_request(request_id, prompt, self._sampling_params(request.sampling, seed))
        return group.future

    def _sampling_params(self, spec: SamplingSpec, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=spec.max_new_tokens,
            min_tokens=spec.min_new_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            seed=seed,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _finish(self, output: Any) -> None:
        sample = self._samples.pop(output.request_id)
        (result,) = output.outputs
        self._close_segment(sample, len(result.token_ids))
        group = sample.group
        group.completions[sample.index] = Completion(
            token_ids=np.asarray(result.token_ids, dtype=np.int32),
            engine_logprobs=np.asarray(result.logprobs.logprobs, dtype=np.float32),
            policy_versions=_versions(sample.segments),
            finish_reason="stop" if result.finish_reason == "stop" else "length",
        )
        if len(group.completions) == len(group.request.seeds):
            group.future.set_result(_samples_of(group))

    def _close_segment(self, sample: _PendingSample, num_tokens: int) -> None:
        already = sum(length for _, length in sample.segments)
        sample.segments.append((self.policy_version, num_tokens - already))


def _versions(segments: Sequence[tuple[int, int]]) -> Int32Array:
    versions, lengths = zip(*segments, strict=True)
    return np.repeat(np.asarray(versions, dtype=np.int32), lengths)


def _samples_of(group: _PendingGroup) -> GroupSamples:
    return GroupSamples(
        ordinal=group.request.ordinal,
        prompt_token_ids=np.asarray(group.request.prompt_token_ids, dtype=np.int32),
        completions=tuple(group.completions[index] for index in range(len(group.request.seeds))),
    )
