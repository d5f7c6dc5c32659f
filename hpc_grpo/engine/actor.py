"""The engine actor: a Ray face on a Sampler that its own thread steps.

Consumes lists of GroupRequests; produces GroupSamples, which stay in the object store until a grader and a
learner fetch them. Weight updates wait for the step in progress and pause no longer than the local copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_grpo.config import Config
from hpc_grpo.engine.engine_args import engine_options
from hpc_grpo.engine.step_loop import StepLoop
from hpc_grpo.run.stacks import dump_stacks_on_signal
from hpc_grpo.types import GroupRequest, GroupSamples

if TYPE_CHECKING:
    from hpc_grpo.engine.vllm import Sampler
    from hpc_grpo.weights.buckets import BucketPlan
    from hpc_grpo.weights.node_group import GroupMembership
    from hpc_grpo.weights.store import StoreSpec


class Engine:
    """Turned into a Ray actor by the placement; asyncio lets many requests wait side by side."""

    def __init__(self, config: Config, stop_token_ids: Sequence[int], *, on_gpu: bool) -> None:
        dump_stacks_on_signal("engine")

        def make() -> Sampler:
            from vllm import EngineArgs

            from hpc_grpo.engine.vllm import Sampler

            return Sampler(EngineArgs(**engine_options(config, on_gpu=on_gpu)), stop_token_ids)

        self._loop = StepLoop(make)
        self._made: Sampler | None = None

    async def ready(self) -> None:
        """Return when vLLM is up; raises what its construction raised."""
        sampler = await asyncio.to_thread(self._loop.wait_ready)
        self._made = sampler  # type: ignore[assignment]

    async def contract_differences(self, plan: BucketPlan) -> list[str]:
        sampler = self._sampler
        return await asyncio.wrap_future(self._loop.call(lambda: sampler.contract_differences(plan)))

    async def join_weight_group(self, membership: GroupMembership, store: StoreSpec) -> None:
        sampler = self._sampler
        await asyncio.wrap_future(self._loop.call(lambda: sampler.join_weight_group(membership, store)))

    async def generate(self, requests: Sequence[GroupRequest]) -> list[GroupSamples] | GroupSamples:
        """Sample all groups; they are queued in one go, in the order given."""
        sampler = self._sampler
        futures = await asyncio.wrap_future(self._loop.call(lambda: sampler.add_groups(requests)))
        results = list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))
        # Called with num_returns = number of groups; Ray wants the bare value where that is one.
        return results if len(results) > 1 else results[0]

    async def receive_weights(self, version: int) -> None:
        """Take part in the publish of `version`, between two steps."""
        sampler = self._sampler
        await asyncio.wrap_future(self._loop.call(lambda: sampler.receive_weights(version)))

    async def load_stored_weights(self) -> None:
        """Load the version that the node's other engines hold: for an engine that takes a dead one's place."""
        sampler = self._sampler
        await asyncio.wrap_future(self._loop.call(sampler.load_stored_weights))

    async def forget_prefixes(self) -> None:
        sampler = self._sampler
        await asyncio.wrap_future(self._loop.call(sampler.forget_prefixes))

    @property
    def _sampler(self) -> Sampler:
        if self._made is None:
            raise RuntimeError("the engine was used before ready() returned")
        return self._made
