"""Samples completions with a vLLM engine, from token ids to token ids. Runs on the thread of the engine's `StepLoop`.

Every completion has its own seed. Samples depend on the prompt, the weights and the seed, but not on other requests,
their order, preemptions or a publish. One seed per engine and publish would save 3 % of an engine's time on CPU and
nothing on GPU, and every draw would depend on all earlier draws.

On GPUs vLLM 0.32 (Model Runner V2) hashes seed, position and token: there is no state to keep. On CPU (V1) each request
has a torch generator, which survives preemption. But if chunked prefill splits a prompt, V1 samples after a chunk and
then rewinds the generator. CPU generators cannot be rewound ("CPU Generator does not use offset"). So chunked prefill
is off on CPU: a prompt that does not fit into a step waits for the next step.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_grpo.errors import PromptError, WeightSyncError
from hpc_grpo.metrics.profiling import StackProfile
from hpc_grpo.types import Completion, GroupRequest, SamplingSpec

if TYPE_CHECKING:
    from hpc_grpo.weights.store import StoredVersion

ADAPTER_ID = 1
"""The number of the policy's adapter in vLLM."""


@dataclass
class _PendingCompletion:
    """A running completion. `policy_versions` gets the versions of new tokens at each weight update and at the end."""

    has_images: bool
    future: Future[Completion] = field(default_factory=Future)
    policy_versions: list[int] = field(default_factory=list)

    def note_tokens(self, num_tokens: int, version: int) -> None:
        """Give `version` to all tokens that have no version yet. The completion has `num_tokens` tokens."""
        self.policy_versions += [version] * (num_tokens - len(self.policy_versions))


class Sampler:
    """Samples completions with a vLLM engine, and records the policy version of each token. Not thread-safe."""

    def __init__(self, engine: Any, stop_token_ids: Sequence[int], adapter: str | None = None) -> None:
        """`engine` is vLLM's LLMEngine. `adapter` is the folder of the first LoRA adapter; None without adapters."""
        self._engine, self._stop_token_ids, self._adapter = engine, list(stop_token_ids), adapter
        self._pending: dict[str, _PendingCompletion] = {}
        self._request_ids = itertools.count()
        self._failure: BaseException | None = None
        self._is_loading = False
        self._stacks: StackProfile | None = None
        self.policy_version = 0

    def has_work(self) -> bool:
        """Return whether a step has something to sample. Requests wait until a load of weights has succeeded."""
        return bool(self._pending) and not self._is_loading

    def add(self, requests: Sequence[GroupRequest]) -> list[Future[Completion]]:
        """Queue completions in the given order. The order determines batches, and so the last bits of logprobs.

        If vLLM refuses a prompt, the prompt's future raises PromptError. Raises the error of an earlier step.
        """
        self.raise_failure()
        return [self._add(request) for request in requests]

    def step(self) -> None:
        """Run a step of vLLM. If the step fails, waiting completions and later calls raise the same error."""
        with self._failing():
            for output in self._engine.step():
                if output.finished:
                    self._finish(output)

    def drain(self) -> None:
        """Finish the steps that vLLM has scheduled ahead (`async_scheduling`), and schedule no new step."""
        in_flight = self._engine.engine_core.engine_core.batch_queue
        if not in_flight or self._failure is not None:
            return
        with self._failing():
            self._engine.sleep(level=0, mode="keep")  # pauses only the scheduler
            while in_flight:
                self.step()
            self._engine.wake_up(tags=["scheduling"])

    @contextmanager
    def _failing(self, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Pass an error of the block to every waiting completion and to later calls, except an error in `unless`."""
        try:
            yield
        except unless:
            raise
        except BaseException as error:  # of any type: vLLM may be in any state after it
            self._failure = error
            self._end_all(error)
            raise

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def forget_requests(self) -> None:
        """Abort all running requests and a profile, and empty the caches, after the driver that asked has ended.

        The requests' futures raise RuntimeError. Raises the error of an earlier step.
        """
        self.raise_failure()
        if self._stacks is not None:
            self.stop_profile()
        self._engine.abort_request(list(self._pending))
        self._end_all(RuntimeError("the driver that asked for it is gone"))
        self.forget_prefixes()

    def on_workers(self, method: str, *args: Any) -> Sequence[Any]:
        """Call a method of `WeightReceiver` on all workers. Raises the error of an earlier step or of a worker."""
        self.raise_failure()
        results: Sequence[Any] = self._engine.collective_rpc(method, args=args)
        for result in results:
            if isinstance(result, str):  # see `receive.catching`
                raise WeightSyncError(result)
        return results

    def receive_weights(
        self, version: int, probe: GroupRequest | None = None, verified: StoredVersion | None = None
    ) -> Completion | None:
        """Take part in the publish of `version`. Running requests continue with it, after the `probe` is completed.

        `verified` is the version that the node's engines have verified. Returns the probe's completion, None without a
        probe. Raises WeightSyncError, the error of an earlier step, or PromptError for a refused probe.
        """
        self._load("hpc_grpo_receive", version, verified)
        self._switch_to(version)
        return None if probe is None else self._answer(probe)

    def load_stored_weights(self) -> None:
        """Load the version that the node's other engines have: this engine has replaced a dead engine."""
        self._switch_to(self._load("hpc_grpo_load_stored")[0])

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache (level 2) for a learner. No request may be running.

        The next publish loads the weights again. On CPU vLLM also pauses and empties its prefix cache, but keeps the
        memory: its CPU build has no memory pool to free. Raises RuntimeError if a request is running.
        """
        self.raise_failure()
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} completions are running: a sleeping engine would lose them")
        self._engine.sleep(level=2)

    def wake_up(self) -> None:
        """Allocate the GPU's memory again. Weights must be loaded before the next step."""
        self.raise_failure()
        self._engine.wake_up()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Running requests keep their tokens; their keys, values and images are recomputed."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._engine.model_config.is_multimodal_model:
            self._engine.reset_encoder_cache()

    def start_profile(self) -> None:
        """Begin to profile this thread and vLLM's workers, into the folder of `engine_options`."""
        self._engine.start_profile()
        self._stacks = StackProfile()

    def stop_profile(self) -> dict[str, bytes]:
        """End the profile. Return its files by name, and delete them."""
        assert self._stacks is not None, "no profile has begun"
        files = {"stacks.html": self._stacks.stop()}
        self._stacks = None
        self._engine.stop_profile()
        folder = Path(self._engine.vllm_config.profiler_config.torch_profiler_dir)
        files |= {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        shutil.rmtree(folder)
        return files

    def _answer(self, probe: GroupRequest) -> Completion:
        """Sample the probe alone: in a batch, other requests would change its last bits and delay it."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        most, scheduler.max_num_active_reqs = scheduler.max_num_active_reqs, 1
        try:
            with self._failing():
                answer = self._add(probe)
                while not answer.done():
                    self.step()
        finally:
            scheduler.max_num_active_reqs = most
        return answer.result()

    def _end_all(self, error: BaseException) -> None:
        waiting = [*self._pending.values()]
        self._pending.clear()
        for completion in waiting:
            completion.future.set_exception(error)

    def _load(self, method: str, *args: Any) -> Sequence[Any]:
        """Let the workers load weights. After a WeightSyncError nothing is sampled until a later load succeeds.

        The workers' version is then unknown: a member of the group may have died after this engine had loaded, and
        later tokens would get the wrong version. After any other error the engine cannot be used.
        """
        self._is_loading = True
        with self._failing(unless=(WeightSyncError,)):
            return self.on_workers(method, *args)

    def _switch_to(self, version: int) -> None:
        for state in self._engine.output_processor.request_states.values():
            self._pending[state.external_req_id].note_tokens(state.detokenizer.num_output_tokens(), self.policy_version)
        # Cached keys and values belong to the old weights.
        self.forget_prefixes()
        self.policy_version = version
        if self._adapter is not None:
            # vLLM's prefix cache identifies adapters by this text, not by their weights.
            self._adapter = f"version {version}"
        self._is_loading = False

    def _add(self, request: GroupRequest) -> Future[Completion]:
        from vllm.exceptions import VLLMClientError
        from vllm.lora.request import LoRARequest

        pending, token_ids = _PendingCompletion(bool(request.images)), list(request.prompt_token_ids)
        pending.future.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel the request
        request_id, vocabulary_size = str(next(self._request_ids)), self._engine.model_config.get_vocab_size()
        # Not a time: vLLM would order requests with equal arrival times by the text of their ids ("10" before "9").
        arrival, priority = float(request_id), -1 if request.is_urgent else 0
        try:
            if token_ids and max(token_ids) >= vocabulary_size:
                # vLLM checks this with its tokenizer, which is not loaded. On a GPU such a token kills the process.
                raise ValueError(f"token id {max(token_ids)} is outside the model's vocabulary of {vocabulary_size}")
            params = sampling_params(request.sampling, request.seeds[0], self._stop_token_ids)
            images = {"multi_modal_data": {"image": list(request.images)}} if request.images else {}
            self._engine.add_request(
                request_id,
                {"prompt_token_ids": token_ids, **images},
                params,
                arrival_time=arrival,
                lora_request=self._adapter and LoRARequest("policy", ADAPTER_ID, self._adapter),
                priority=priority,
            )
        except (ValueError, VLLMClientError) as error:
            refusal = PromptError(
                f"An engine refuses the prompt of ordinal {request.ordinal}: {error}. Fix or remove that item of the "
                f"data set, or fix the tokenizer."
            )
            pending.future.set_exception(refusal)
        else:
            self._pending[request_id] = pending
        return pending.future

    def _finish(self, output: Any) -> None:
        pending = self._pending.pop(output.request_id)
        (result,) = output.outputs
        pending.note_tokens(len(result.token_ids), self.policy_version)
        if (experts := result.routed_experts) is not None:
            num_computed = len(output.prompt_token_ids) + len(result.token_ids) - 1
            assert len(experts) == num_computed, f"experts of {len(experts)} tokens, {num_computed} were computed"
        pending.future.set_result(
            Completion(
                token_ids=np.asarray(result.token_ids, dtype=np.int32),
                # Speculated tokens after a text of `stop` have logprobs, but are not part of the completion.
                engine_logprobs=np.asarray(result.logprobs.logprobs[: len(result.token_ids)], dtype=np.float32),
                policy_versions=np.asarray(pending.policy_versions, dtype=np.int32),
                finish_reason="stop" if result.finish_reason == "stop" else "length",
                context_ids=np.asarray(output.prompt_token_ids, np.int32) if pending.has_images else (),
                experts=experts,
            )
        )


def sampling_params(spec: SamplingSpec, seed: int, stop_token_ids: list[int]) -> Any:
    """Return vLLM's parameters of one completion with its own seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=spec.max_new_tokens,
        min_tokens=spec.min_new_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        logprobs=0,
        flat_logprobs=True,
        stop=list(spec.stop),
        # Decode all tokens, special tokens included: any token may be part of a text of `stop`.
        detokenize=bool(spec.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
