"""A sampler on a vLLM engine that only keeps the requests it is given."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.types import GroupRequest, SamplingSpec
from tests.support.configs import minimal_config

pytest.importorskip("vllm")

from hpc_grpo.engine.vllm import Sampler, engine_options

REQUEST = GroupRequest(0, (1, 2), (7, 8), SamplingSpec(4, 0, 1.0, 1.0))


class RequestState:
    """A request that vLLM has under way, with no token sampled yet; it stands for its detokenizer too."""

    def __init__(self, request_id: str) -> None:
        self.external_req_id = request_id
        self.detokenizer = self

    def num_output_tokens(self) -> int:
        return 0


class FakeVllm:
    """Stands for LLMEngine: as vLLM does, it keeps the requests of a step that raised."""

    def __init__(self) -> None:
        self.output_processor = self
        self.request_states: dict[str, RequestState] = {}
        self.asked_of_workers: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.request_states[request_id] = RequestState(request_id)

    def step(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def collective_rpc(self, method: str, args: Any) -> list[Any]:
        self.asked_of_workers.append(method)
        return [None]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        pass


def test_engine_that_raised_in_a_step_tells_the_next_publish_why() -> None:
    vllm = FakeVllm()
    sampler = Sampler(vllm, [])
    (group,) = sampler.add_groups([REQUEST])
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        sampler.step()
    sampler.fail(raised.value)
    assert not sampler.has_work()
    assert group.exception() is raised.value
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampler.receive_weights(1)
    assert (sampler.policy_version, vllm.asked_of_workers) == (0, [])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampler.add_groups([REQUEST])
    assert not sampler.has_work()


def test_sampler_that_is_well_takes_part_in_a_publish_and_keeps_its_requests() -> None:
    vllm = FakeVllm()
    sampler = Sampler(vllm, [])
    sampler.add_groups([REQUEST])
    sampler.receive_weights(1)
    assert (sampler.policy_version, vllm.asked_of_workers) == (1, ["hpc_grpo_receive"])
    assert sampler.has_work()


def test_prompts_are_cut_on_gpus_alone() -> None:
    """The generators of requests on CPU cannot be turned back, as vLLM does where it cut a prompt."""
    options = {on_gpu: engine_options(minimal_config(), on_gpu=on_gpu) for on_gpu in (True, False)}
    chosen = {
        on_gpu: (each["enable_chunked_prefill"], each["max_num_batched_tokens"]) for on_gpu, each in options.items()
    }
    assert chosen == {True: (True, 8192), False: (False, 2048)}


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
def test_an_engine_computes_logits_in_the_precision_of_the_learner(head_dtype: str) -> None:
    options = engine_options(minimal_config(model={"head_dtype": head_dtype}), on_gpu=True)
    assert options["hf_overrides"] == {"head_dtype": head_dtype}
