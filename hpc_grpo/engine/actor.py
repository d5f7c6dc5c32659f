"""The engine actor: the driver's calls to a vLLM engine, and the thread that steps the engine.

Produces `GroupSamples`, which stay in the object store until a grader and a learner fetch them. The thread runs
all other calls to the engine between two steps, weight updates included. Running requests continue after an update.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from hpc_grpo.config import Config
from hpc_grpo.data.images import with_opened_images
from hpc_grpo.data.templates import Tokenizer
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.engine.vllm import start_vllm
from hpc_grpo.run.pulse import PULSE, patience_of_actor
from hpc_grpo.run.stacks import dump_stacks_on_signal
from hpc_grpo.system.gpus import keep_near_gpus
from hpc_grpo.system.usage import METER, Usage
from hpc_grpo.types import Completion, GroupRequest, GroupSamples

if TYPE_CHECKING:
    from hpc_grpo.weights.store import BucketLayout, GroupMembership, StoredVersion, StoreSpec

T = TypeVar("T")
_SAMPLING = "sampling"


class StepLoop:
    """Makes a sampler and runs its steps, on its own thread. Waits for `call` when idle.

    Before a call the thread drains the sampler, so no step is running and no token mixes old and new weights. A call
    without `drains`, such as a new request, runs while scheduled steps are still running.
    """

    def __init__(self, make: Callable[[], Sampler]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[Sampler], Any], Future[Any], bool]] = queue.SimpleQueue()
        self._sampler: Future[Sampler] = Future()
        threading.Thread(target=self._run, args=(make,), name="engine-steps", daemon=True).start()

    def wait_ready(self) -> Sampler:
        """Wait for the sampler and return it. Raises the error of `make`."""
        return self._sampler.result()

    def call(self, function: Callable[[Sampler], T], *, drains: bool = True) -> Future[T]:
        """Run `function(sampler)` on the thread between two steps. The future raises its error, or that of `make`."""
        future: Future[T] = Future()
        self._calls.put((function, future, drains))
        return future

    def _run(self, make: Callable[[], Sampler]) -> None:
        try:
            sampler = make()
        except BaseException as error:  # noqa: BLE001 - raised by all who wait or call
            self._sampler.set_exception(error)
            while True:
                self._calls.get()[1].set_exception(error)
        self._sampler.set_result(sampler)
        while True:
            if is_idle := not sampler.has_work():
                PULSE.turn_to("")
            try:
                function, future, drains = self._calls.get(block=is_idle)
            except queue.Empty:
                self._step(sampler)
                continue
            try:
                if drains:
                    sampler.drain()  # counts as sampling for the pulse; the call does not
                PULSE.turn_to("")
                future.set_result(function(sampler))
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                future.set_exception(error)

    def _step(self, sampler: Sampler) -> None:
        if PULSE.work != _SAMPLING:
            PULSE.turn_to(_SAMPLING)
        try:
            with METER.busy():
                sampler.step()
            PULSE.beat()
        except BaseException as error:  # noqa: BLE001 - raised by every caller that waits
            traceback.print_exception(error)  # callers only see the cause


class Engine:
    """The driver makes it a Ray actor. asyncio lets many requests wait at the same time."""

    def __init__(
        self,
        config: Config,
        stop_token_ids: Sequence[int],
        tokenizer: Tokenizer | None = None,
        *,
        on_gpu: bool,
        reads_weights: bool = False,
    ) -> None:
        """Start vLLM on the engine's thread, without waiting. Environments need the tokenizer.

        `reads_weights`: vLLM loads the weights of `model.path`, because no learner publishes weights.
        """
        from hpc_grpo.engine.episodes import EpisodePlayer  # with aiohttp, which the driver does not need

        dump_stacks_on_signal("engine")
        PULSE.open("engine", patience_of_actor(config))
        # Call this before the import of vLLM, whose threads inherit the cores.
        if said := keep_near_gpus():
            print(said, flush=True)
        if on_gpu:
            METER.watch_gpus()
        self._config, self._on_gpu = config, on_gpu
        self._opened: tuple[Path, StoreSpec] | None = None
        self._verified: StoredVersion | None = None
        adapter = (config.model.adapter or "not published") if config.publishes_adapter else None
        self._loop = StepLoop(
            lambda: Sampler(start_vllm(config, on_gpu=on_gpu, reads_weights=reads_weights), stop_token_ids, adapter)
        )
        self._player = EpisodePlayer(
            config, tokenizer, lambda requests: self.between_steps(lambda sampler: sampler.add(requests), drains=False)
        )
        self._groups = defaultdict[tuple[str, int], asyncio.Future[asyncio.Task[GroupSamples]]](asyncio.Future)

    async def ready(self) -> None:
        """Wait until vLLM is up. Raises the error of its start or of a step."""
        sampler = await asyncio.to_thread(self._loop.wait_ready)
        sampler.raise_failure()

    async def serve_next(self, config: Config) -> None:
        """Drop the requests of the previous driver, and empty the prefix cache.

        Raises ValueError if the config differs from this engine's, and the error of an earlier step.
        """
        if config != self._config:
            raise ValueError("this engine was started with another config")
        self._player.end_all()
        await self.between_steps(lambda sampler: sampler.forget_requests())
        self._groups.clear()
        self._verified = None
        METER.read()  # the usage under the previous driver must not count for the new one

    async def contract_differences(self, layout: BucketLayout) -> list[str]:
        workers = await self.between_steps(lambda own: own.on_workers("hpc_grpo_contract_differences", layout))
        return [line for lines in workers for line in lines]

    async def join_weight_group(self, membership: GroupMembership, store: StoreSpec) -> None:
        """Let all workers join the node's group. Each worker verifies a share of the node's checksums."""
        from hpc_grpo.weights.store import WeightStore

        if self._opened != (membership.folder, store):  # a new group may use the same store
            self._store = await asyncio.to_thread(WeightStore, membership.folder, store, create=False)
            self._opened = membership.folder, store
        first = membership.rank - 1
        self._shares = range(first, first + self._config.engine.tensor_parallel)
        self._num_shares = membership.size - 1
        alpha = self._config.lora.alpha if self._config.lora and self._config.publishes_adapter else None
        await self.between_steps(lambda sampler: sampler.on_workers("hpc_grpo_join", membership, store, alpha))

    async def verify_weights(self, staged: StoredVersion) -> None:
        """Compare this engine's shares of the staged version with their checksums, on threads beside the sampling.

        The node's engines read the same memory, and each verifies a part. On a GPU, the workers also begin to copy the
        version to the GPU. Raises WeightSyncError if a checksum differs.
        """
        self._verified = None
        tasks: list[Any] = [
            asyncio.to_thread(self._store.verify, staged, share, self._num_shares) for share in self._shares
        ]
        if self._on_gpu:
            tasks.append(self.between_steps(lambda sampler: sampler.on_workers("hpc_grpo_copy_to_gpu", staged)))
        await asyncio.gather(*tasks)
        self._verified = staged

    async def generate(self, call: str, requests: Sequence[GroupRequest]) -> None:
        """Queue all groups at once, in the given order, and return. `samples` returns the samples of each group."""
        for index, playing in enumerate(self._player.start(requests)):
            self._groups[call, index].set_result(playing)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def samples(self, call: str, index: int) -> tuple[GroupSamples, None]:
        """Return one group of the `generate` call named `call`, which may arrive later: Ray does not order calls.

        The second value, None, gives the driver a small reference that becomes ready with the samples.
        """
        try:
            return await (await self._groups[call, index]), None
        finally:
            self._groups.pop((call, index), None)  # `serve_next` may have dropped all

    async def receive_weights(self, version: int, probe: GroupRequest | None = None) -> Completion | None:
        """Load the published version. Return the completion of the `probe`, sampled before other requests.

        Returns None without a probe. Raises WeightSyncError, or PromptError if vLLM refuses the probe.
        """
        if probe is not None and probe.images:
            probe = await with_opened_images(probe)
        return await self.between_steps(lambda sampler: sampler.receive_weights(version, probe, self._verified))

    async def between_steps(self, function: Callable[[Sampler], T], *, drains: bool = True) -> T:
        """Call `function(sampler)` between two steps (`StepLoop`), for example `Sampler.sleep`. Return its result."""
        return await asyncio.wrap_future(self._loop.call(function, drains=drains))

    async def usage(self) -> Usage:
        """Return the resource usage since the last call. `busy_s` is the time of sampling."""
        return METER.read()

    async def start_profile(self) -> None:
        await self.between_steps(lambda sampler: sampler.start_profile())

    async def stop_profile(self) -> dict[str, bytes]:
        return await self.between_steps(lambda sampler: sampler.stop_profile())
