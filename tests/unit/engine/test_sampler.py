"""A sampler on a vLLM engine that only keeps the requests it is given."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.errors import EXIT_CONFIG, PromptError, WeightSyncError
from hpc_grpo.types import Completion, GroupRequest, SamplingSpec

pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError

from hpc_grpo.engine import sampler as sampler_module
from hpc_grpo.engine.actor import StepLoop
from hpc_grpo.engine.sampler import Sampler

VOCABULARY_SIZE, LONG, DEADLINE_S = 100, 6, 60.0
REQUEST = GroupRequest(0, (1, 2), (7,), SamplingSpec(4, 0, 1.0, 1.0))


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
        self.model_config = self
        self.request_states: dict[str, RequestState] = {}
        self.asked_of_workers: list[str] = []
        self.adapters: list[str | None] = []
        self.engine_core = self.scheduler = self
        self.max_num_active_reqs = 8
        self.batch_queue: Any = None

    def add_request(
        self, request_id: str, prompt: Any, params: Any, arrival_time: float, priority: int, lora_request: Any
    ) -> None:
        self.adapters.append(lora_request and lora_request.lora_path)
        if not prompt["prompt_token_ids"]:
            raise VLLMValidationError("The decoder prompt cannot be empty")
        self.request_states[request_id] = RequestState(request_id)

    is_multimodal_model = False

    def get_vocab_size(self) -> int:
        return VOCABULARY_SIZE

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.request_states[request_id]

    def step(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def collective_rpc(self, method: str, args: Any) -> list[Any]:
        self.asked_of_workers.append(method)
        return [None]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        pass


class AheadVllm(FakeVllm):
    """Schedules a step ahead, as vLLM does (`EngineCore.step_with_batch_queue`); each step samples one token of each.

    A token is the number of the weights that it was computed with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch_queue: deque[int] = deque()
        self.weights, self.is_paused = 0, False
        self.tokens: list[int] = []

    def num_output_tokens(self) -> int:
        return len(self.tokens)

    def add_request(self, request_id: str, *args: Any, **options: Any) -> None:
        super().add_request(request_id, *args, **options)
        self.request_states[request_id].detokenizer = self  # type: ignore[assignment]

    def step(self) -> list[Any]:
        if not self.is_paused:
            self.batch_queue.appendleft(self.weights)
            if len(self.batch_queue) < 2:
                return []
        self.tokens.append(self.batch_queue.pop())
        if len(self.tokens) < LONG:
            return []
        ((request_id, _),) = self.request_states.items()
        self.request_states.clear()
        logprobs = SimpleNamespace(logprobs=[0.0] * LONG)
        result = SimpleNamespace(token_ids=self.tokens, logprobs=logprobs, finish_reason="length", routed_experts=None)
        return [SimpleNamespace(finished=True, request_id=request_id, outputs=[result])]

    def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep")
        self.is_paused = True

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.is_paused = False

    def collective_rpc(self, method: str, args: Any) -> list[Any]:
        assert not self.batch_queue, "weights are loaded while a step computes with the old ones"
        self.weights, _ = args
        return super().collective_rpc(method, args)


def sampling(vllm: Any) -> tuple[Sampler, Future[Completion]]:
    """A sampler with one completion under way."""
    sampler = Sampler(vllm, [])
    return sampler, sampler.add([REQUEST])[0]


def test_a_publish_waits_for_the_steps_scheduled_ahead_and_every_token_counts_as_its_weights() -> None:
    vllm = AheadVllm()
    sampler, answer = sampling(vllm)
    for version in range(1, 4):
        sampler.step()
        sampler.step()
        sampler.drain()
        sampler.receive_weights(version)
    completion = answer.result(timeout=0)
    assert completion.policy_versions.tolist() == completion.token_ids.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("adapter", "asked_with"), [(None, [None] * 3), ("/adapters/a", ["/adapters/a", "version 1", "version 2"])]
)
def test_each_version_of_an_adapter_has_a_name_of_its_own(adapter: str | None, asked_with: list[str | None]) -> None:
    """The prefix cache of vLLM knows adapters by their names."""
    vllm = FakeVllm()
    sampler = Sampler(vllm, [], adapter)
    for version in (1, 2, 3):
        sampler.add([REQUEST])
        vllm.request_states.clear()
        sampler.receive_weights(version)
    assert vllm.adapters == asked_with


def test_a_step_ahead_that_fails_fails_the_publish_and_all_who_wait() -> None:
    vllm = AheadVllm()
    sampler, waiting = sampling(vllm)
    sampler.step()
    failure = RuntimeError("CUDA error")

    def fail() -> Any:
        raise failure

    vllm.step = fail  # type: ignore[method-assign]
    loop = StepLoop(lambda: sampler)
    with pytest.raises(RuntimeError, match="CUDA error"):
        loop.call(lambda sampler: sampler.receive_weights(1)).result(DEADLINE_S)
    assert waiting.exception(DEADLINE_S) is failure
    assert vllm.weights == 0


def test_engine_that_raised_in_a_step_tells_the_next_publish_why() -> None:
    vllm = FakeVllm()
    sampler, waiting = sampling(vllm)
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        sampler.step()
    assert not sampler.has_work()
    assert waiting.exception() is raised.value
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampler.receive_weights(1)
    assert (sampler.policy_version, vllm.asked_of_workers) == (0, [])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampler.add([REQUEST])
    assert not sampler.has_work()


def test_an_engine_forgets_what_the_driver_before_asked_for_unless_it_has_failed() -> None:
    vllm = FakeVllm()
    sampler, waiting = sampling(vllm)
    sampler.forget_requests()
    assert isinstance(waiting.exception(), RuntimeError)
    assert (sampler.has_work(), vllm.request_states) == (False, {})
    for fails in (sampler.step, sampler.forget_requests):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            fails()


def test_the_profile_of_a_driver_that_is_gone_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next driver's would begin where that one's did."""
    vllm = ProfiledVllm(tmp_path)
    monkeypatch.setattr(sampler_module, "StackProfile", FakeStacks)
    sampler = Sampler(vllm, [])
    for driver in range(2):
        sampler.start_profile()
        assert vllm.profiles == driver + 1
        sampler.forget_requests()
        assert not vllm.is_profiling


class FakeStacks:
    def stop(self) -> bytes:
        return b"<html>"


class ProfiledVllm(FakeVllm):
    """Refuses a second profile beside the first one, as vLLM does, and writes them to a folder that it makes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.vllm_config = self.profiler_config = self
        self.torch_profiler_dir = str(folder / "traces")
        self.is_profiling, self.profiles = False, 0

    def start_profile(self) -> None:
        assert not self.is_profiling
        self.is_profiling = True
        self.profiles += 1

    def stop_profile(self) -> None:
        self.is_profiling = False
        Path(self.torch_profiler_dir).mkdir()


class FailingVllm(FakeVllm):
    """Raises `failure` from the next call of its workers."""

    failure: Exception | None

    def collective_rpc(self, method: str, args: Any) -> list[Any]:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return super().collective_rpc(method, args)


def test_nothing_is_sampled_between_a_publish_that_failed_and_the_next() -> None:
    """A peer may have died when this engine had loaded: its tokens would count as the old version's."""
    vllm = FailingVllm()
    sampler, waiting = sampling(vllm)
    vllm.failure = WeightSyncError("the node's weight group broke at rank 2")
    with pytest.raises(WeightSyncError):
        sampler.receive_weights(4)
    assert (sampler.has_work(), sampler.policy_version, waiting.done()) == (False, 0, False)
    sampler.receive_weights(4)
    assert (sampler.has_work(), sampler.policy_version) == (True, 4)


def test_weights_that_stopped_in_the_middle_of_a_load_are_never_sampled_from() -> None:
    vllm = FailingVllm()
    sampler, waiting = sampling(vllm)
    vllm.failure = MemoryError("no room for lm_head")
    with pytest.raises(MemoryError):
        sampler.receive_weights(4)
    assert isinstance(waiting.exception(timeout=0), MemoryError)
    with pytest.raises(MemoryError):  # nor by the next driver, whose load would begin where this one stopped
        sampler.forget_requests()


class AnsweringVllm(FakeVllm):
    """Completes the request that came last with one token, as the only one that may run."""

    def step(self) -> list[Any]:
        assert self.max_num_active_reqs == 1
        request_id, _ = self.request_states.popitem()
        logprobs = SimpleNamespace(logprobs=[-1.0])
        result = SimpleNamespace(token_ids=[5], logprobs=logprobs, finish_reason="length", routed_experts=None)
        return [SimpleNamespace(finished=True, request_id=request_id, outputs=[result])]


def test_a_probe_is_answered_alone_by_the_new_weights_before_what_is_in_flight_goes_on() -> None:
    vllm = AnsweringVllm()
    sampler, waiting = sampling(vllm)
    answer = sampler.receive_weights(3, replace(REQUEST, is_urgent=True))
    assert answer is not None
    assert answer.policy_versions.tolist() == [3]
    assert not waiting.done()
    assert vllm.max_num_active_reqs == 8


class MiscountingVllm(AnsweringVllm):
    """Returns the experts of one token for a prompt of three tokens and a completion of one."""

    def step(self) -> list[Any]:
        (output,) = super().step()
        output.prompt_token_ids, output.outputs[0].routed_experts = [1, 2, 3], [[[0]]]
        return [output]


def test_experts_of_too_few_tokens_never_reach_a_learner() -> None:
    sampler, _ = sampling(MiscountingVllm())
    with pytest.raises(AssertionError, match="experts of 1 tokens, 3 were computed"):
        sampler.receive_weights(3, replace(REQUEST, is_urgent=True))


def test_an_engine_that_raises_over_the_probe_tells_the_others_why() -> None:
    vllm = FakeVllm()
    sampler, waiting = sampling(vllm)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sampler.receive_weights(1, replace(REQUEST, is_urgent=True))
    assert "illegal memory access" in str(waiting.exception())
    assert vllm.max_num_active_reqs == 8


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ((), "The decoder prompt cannot be empty"),
        ((1, VOCABULARY_SIZE), "token id 100 is outside the model's vocabulary of 100"),
    ],
)
def test_prompt_that_vllm_refuses_fails_alone(token_ids: tuple[int, ...], reason: str) -> None:
    """vLLM looks for tokens that the model lacks only where it has the tokenizer, which engines have not."""
    sampler = Sampler(FakeVllm(), [])
    refused, taken = sampler.add([replace(REQUEST, ordinal=5, prompt_token_ids=token_ids), REQUEST])
    with pytest.raises(PromptError, match=f"prompt of ordinal 5: .*{reason}") as raised:
        refused.result(timeout=0)
    assert raised.value.exit_code == EXIT_CONFIG
    assert not taken.done()
    sampler.receive_weights(1)
    assert sampler.has_work()


def test_nothing_is_left_to_do_where_all_prompts_are_refused() -> None:
    sampler = Sampler(FakeVllm(), [])
    sampler.add([replace(REQUEST, prompt_token_ids=())])
    assert not sampler.has_work()


class SleepyVllm(FakeVllm):
    """Notes in which level it sleeps, and that it wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[int | str] = []

    def sleep(self, level: int) -> None:
        self.slept.append(level)

    def wake_up(self) -> None:
        self.slept.append("awake")


def test_an_engine_sleeps_so_deep_that_nothing_of_it_stays_on_the_gpu_and_only_without_work() -> None:
    vllm = SleepyVllm()
    sampler = Sampler(vllm, [])
    sampler.sleep()
    sampler.wake_up()
    sampler.add([REQUEST, REQUEST])
    with pytest.raises(RuntimeError, match="2 completions are running"):
        sampler.sleep()
    assert vllm.slept == [2, "awake"]
