"""The engine's side of weight sync: a vLLM worker extension.

Runs inside each vLLM worker, called between two steps of the engine. Consumes an announcement and the node's
weight store; produces a model that holds the announced version, and an acknowledgement.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.weights.buckets import BucketPlan
from hpc_grpo.weights.contract import contract_differences, engine_parameters
from hpc_grpo.weights.node_group import GroupMembership, NodeGroup
from hpc_grpo.weights.refusal import refusing
from hpc_grpo.weights.store import StoredVersion, StoreSpec, WeightStore

_FAILED = -1


class WeightReceiver:
    """Methods that vLLM mixes into its worker class; attributes are prefixed to stay clear of the worker's own."""

    model_runner: Any
    vllm_config: Any

    def hg_contract_differences(self, plan: BucketPlan) -> list[str]:
        """Names, shapes and dtypes in which the plan and this worker's model differ; empty when they agree."""
        parameters = engine_parameters(self._hg_model, self.vllm_config)
        return contract_differences(plan.specs, parameters, self._hg_packed_modules)

    @refusing
    def hg_join(self, engine: GroupMembership, spec: StoreSpec) -> None:
        """Open the node's store and join its group, as the engine's rank plus the tensor-parallel rank."""
        self._hg_store = WeightStore(engine.folder, spec, create=False)
        self._hg_group = NodeGroup(replace(engine, rank=engine.rank + self.vllm_config.parallel_config.rank))

    @refusing
    def hg_receive(self, version: int) -> None:
        """Load the announced version; every member learns of a failure through the acknowledgement.

        Raises WeightSyncError on a checksum mismatch, a dead member or the deadline.
        """
        stored = self._hg_group.receive_announcement(len(self._hg_store.plan.buckets))
        try:
            if stored.version != version:
                raise WeightSyncError(f"weight version {stored.version} was announced where {version} was due")
            self._hg_store.verify(stored)
            self._hg_load(stored)
        except BaseException:
            # Whatever it was, the members that wait must hear of it, and it is raised again below.
            # Without the group there is nobody to tell; the cause is what the driver has to hear.
            with suppress(WeightSyncError):
                self._hg_group.acknowledge(_FAILED)
            raise
        self._hg_group.acknowledge(stored.version)

    @refusing
    def hg_load_stored(self) -> int:
        """Load the version that the node's engines hold, without its announcement; gives its number."""
        stored = self._hg_store.current()
        self._hg_store.verify(stored)
        self._hg_load(stored)
        return stored.version

    @property
    def _hg_model(self) -> Any:
        return self.model_runner.get_model()

    @property
    def _hg_packed_modules(self) -> dict[str, list[str]]:
        return getattr(self._hg_model, "packed_modules_mapping", None) or {}

    def _hg_load(self, stored: StoredVersion) -> None:
        model = self._hg_model
        store = self._hg_store
        pairs = (pair for bucket in store.plan.buckets for pair in store.tensors(stored.buffer, bucket))
        initialize_layerwise_reload(model)
        model.load_weights(pairs)
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        _repack_tied_head(model)


def _repack_tied_head(model: Any) -> None:
    """On CPU a linear's weight is packed for oneDNN; a tied lm_head would keep the packing of the old embedding."""
    head, embedding = (
        getattr(model, "lm_head", None),
        getattr(getattr(model, "model", None), "embed_tokens", None),
    )
    if head is None or embedding is None or head.weight is not embedding.weight:
        return
    head.quant_method.process_weights_after_loading(head)
