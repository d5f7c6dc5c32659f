"""The engine's side of a publish: methods that vLLM mixes into its worker class.

Runs in each vLLM worker of an engine, between two steps. Waits for the publisher's announcement and the other workers'
acknowledgements, each with the group's deadline. A version that the node's engines verified while they sampled
(`engine/actor.py`) is loaded without another check.

vLLM refuses an extension whose names its worker class has too. So all names here start with `hpc_grpo_`.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from hpc_grpo.engine.sampler import ADAPTER_ID
from hpc_grpo.errors import WeightSyncError
from hpc_grpo.system.processes import tie_to_parent
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.contract import contract_differences
from hpc_grpo.weights.cuda import StagedOnGpu, open_store
from hpc_grpo.weights.node_group import LOAD_FAILED, NodeGroup
from hpc_grpo.weights.store import BucketLayout, GroupMembership, StoredVersion, StoreSpec

_LEARNERS_NAMES = (
    (".experts.routed_experts.w13_weight", ".experts.gate_up_proj"),
    (".experts.routed_experts.w2_weight", ".experts.down_proj"),
    (".block_sparse_moe.", ".mlp."),
)
"""Parts of vLLM's names for the parameters of a mixture of experts, and the learner's names for the same parts."""

_LARGEST_BATCH_BYTES = 2 * 2**30
"""Assumed for the activations of an engine's largest batch if vLLM has not profiled them."""

_MIXTRALS_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".experts.gate_up_proj", ".experts.w13"),
    (".experts.down_proj", ".experts.w2"),
)
"""Parts of the learner's names, and vLLM's names for loading a Mixtral. Other mixtures load by the learner's names."""


def catching(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's method to return the text of a WeightSyncError. `Sampler.on_workers` raises it again.

    vLLM's worker processes pass on only the text of an exception, but the driver needs its type: a WeightSyncError ends
    the driver, any other error makes it replace the engine.
    """

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except WeightSyncError as error:
            return str(error)

    return call


class WeightReceiver:
    """Extends vLLM's worker class. The worker sets `vllm_config` and `model_runner`."""

    model_runner: Any
    vllm_config: Any
    _hpc_grpo_opened: tuple[Path, StoreSpec] | None = None
    _hpc_grpo_on_gpu: StagedOnGpu | None = None
    _hpc_grpo_lora_alpha: float | None = None

    def hpc_grpo_contract_differences(self, layout: BucketLayout) -> list[str]:
        """List the differences in names, shapes and dtypes between the layout and this worker's model."""
        if self.vllm_config.lora_config is not None:
            return adapter_differences(layout.specs, self.model_runner.lora_manager._adapter_manager)
        model = self.model_runner.get_model()
        packed_modules = getattr(model, "packed_modules_mapping", None) or {}
        specs = layout.specs
        if hasattr(model, "get_language_model") and hasattr(model, "hf_to_vllm_mapper"):  # a model of images
            names = model.hf_to_vllm_mapper.apply_list([spec.name for spec in specs])
            specs = tuple(replace(spec, name=name) for spec, name in zip(specs, names, strict=True))
        return contract_differences(specs, engine_parameters(model, self.vllm_config), packed_modules)

    @catching
    def hpc_grpo_join(self, engine: GroupMembership, spec: StoreSpec, lora_alpha: float | None = None) -> None:
        """Open the node's store and join its group. This worker's rank is the engine's plus its tensor-parallel rank.

        With `lora_alpha` the store holds an adapter with this alpha, otherwise complete weights.
        """
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            # Otherwise a worker that hangs on its GPU survives its engine, and keeps the GPU's memory.
            tie_to_parent(os.getppid(), signal.SIGKILL)
        self._hpc_grpo_lora_alpha = lora_alpha
        if self._hpc_grpo_opened != (engine.folder, spec):  # a new group may use the same store
            self._hpc_grpo_store = open_store(engine.folder, spec, create=False)
            self._hpc_grpo_opened = engine.folder, spec
            may_copy = self._hpc_grpo_store.is_page_locked
            # A sleeping engine gives all GPU memory to a learner. The next driver's store has the same layout.
            if may_copy and not self.vllm_config.model_config.enable_sleep_mode and self._hpc_grpo_on_gpu is None:
                # Absent with a fixed size of the KV cache. vLLM profiles the memory of its largest batch, but frees it.
                largest_batch = getattr(self, "peak_activation_memory", _LARGEST_BATCH_BYTES)
                self._hpc_grpo_on_gpu = StagedOnGpu(spec.layout, largest_batch)
        self._hpc_grpo_group = NodeGroup(replace(engine, rank=engine.rank + self.vllm_config.parallel_config.rank))

    def hpc_grpo_copy_to_gpu(self, staged: StoredVersion) -> None:
        """Begin to copy the staged version to the GPU, while sampling continues, if the GPU has memory for it."""
        if self._hpc_grpo_on_gpu is not None:
            self._hpc_grpo_on_gpu.begin(self._hpc_grpo_store, staged)

    @catching
    def hpc_grpo_receive(self, version: int, verified: StoredVersion | None) -> None:
        """Load the announced version. Compare its checksums first, unless it is the `verified` version.

        Raises WeightSyncError on a checksum mismatch, a dead member or the deadline.
        """
        store, group = self._hpc_grpo_store, self._hpc_grpo_group
        stored = group.receive_announcement(len(store.layout.blocks))
        try:
            if stored.version != version:
                raise WeightSyncError(f"weight version {stored.version} was announced, but {version} was expected")
            self._hpc_grpo_load(stored, is_verified=stored == verified)
        except BaseException:
            # Waiting members must receive any failure. If the group is broken too, no member can receive it,
            # and the driver needs the first error.
            with suppress(WeightSyncError):
                group.acknowledge(LOAD_FAILED)
            raise
        group.acknowledge(stored.version)

    @catching
    def hpc_grpo_load_stored(self) -> int:
        """Load the version that the node's other engines have, without an announcement. Return its number.

        Raises WeightSyncError if its checksums do not match.
        """
        stored = self._hpc_grpo_store.current()
        self._hpc_grpo_load(stored, is_verified=False)
        return stored.version

    def _hpc_grpo_load(self, stored: StoredVersion, *, is_verified: bool) -> None:
        """Load a stored version into the model. Raises WeightSyncError if its checksums do not match."""
        store, model = self._hpc_grpo_store, self.model_runner.get_model()
        if not is_verified:
            store.verify(stored)
        pairs: Iterable[tuple[str, torch.Tensor]] = (
            pair for bucket in store.layout.buckets for pair in store.tensors(bucket)
        )
        if is_verified and self._hpc_grpo_on_gpu is not None:
            pairs = self._hpc_grpo_on_gpu.tensors(stored) or pairs
        if self._hpc_grpo_lora_alpha is not None:
            self._hpc_grpo_load_adapter(dict(pairs), self._hpc_grpo_lora_alpha)
        else:
            self._hpc_grpo_load_model(model, pairs)
        # Wait until the GPU has read the store: after the acknowledgement the publisher may overwrite it.
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _hpc_grpo_load_model(self, model: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        if any(name.endswith(".block_sparse_moe") for name, _ in model.named_modules()):
            pairs = ((_renamed(name, _MIXTRALS_NAMES), tensor) for name, tensor in pairs)
        if not torch.cuda.is_available():
            # On CPU, the kernel of experts holds packed weights. Drop it: a reload would keep the old weights.
            for module in model.modules():
                if hasattr(module, "routed_experts"):
                    module.routed_experts.quant_method.moe_kernel = None
        # Like vLLM's own reload: layers read the current config while they process loaded weights.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(pairs)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # On CPU, linear layers are packed for oneDNN. A tied lm_head would keep the old embedding's packing.
            decoder = model.get_language_model() if hasattr(model, "get_language_model") else model
            head = getattr(decoder, "lm_head", getattr(model, "lm_head", None))
            embedding = getattr(getattr(decoder, "model", decoder), "embed_tokens", None)
            if head is not None and embedding is not None and head.weight is embedding.weight:
                head.quant_method.process_weights_after_loading(head)

    def _hpc_grpo_load_adapter(self, tensors: dict[str, torch.Tensor], alpha: float) -> None:
        """Replace the previous adapter. The base model does not change."""
        manager = self.model_runner.lora_manager
        rank = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A.weight"))
        # Clones: vLLM multiplies B by its scale in place, which would change the store.
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in tensors.items()},
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
        )
        adapters = manager._adapter_manager
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(ADAPTER_ID)


def adapter_differences(specs: Iterable[ParameterSpec], manager: Any) -> list[str]:
    """List the adapter's parameters that have no layer in the engine. vLLM would silently ignore them."""
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    missing = [spec.name for spec in specs if parse_fine_tuned_lora_name(spec.name)[0] not in known]
    return [f"{name}: the learner publishes it, but the engine has no such layer for an adapter" for name in missing]


def engine_parameters(model: Any, vllm_config: Any) -> list[ParameterSpec]:
    """List the parameters of a vLLM model in load format, unsharded and without vocabulary padding.

    Shapes come from vLLM's metadata for reloading, because loaded weights may be repacked. A tied lm_head is left out.
    """
    specs: list[ParameterSpec] = []
    tied = bool(getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False))
    for full_name, live in model.named_parameters():
        module_name, _, name = full_name.rpartition(".")
        if tied and module_name == "lm_head":
            continue
        module = model.get_submodule(module_name)
        tensor = get_layerwise_info(module).restore_metadata[0].get(name, live)
        shape = unsharded_shape(module, tuple(tensor.shape), vllm_config.parallel_config.tensor_parallel_size)
        learners_name = _renamed(full_name, _LEARNERS_NAMES)
        specs.append(ParameterSpec(learners_name, shape, str(tensor.dtype).removeprefix("torch.")))
    return specs


def _renamed(name: str, parts: Sequence[tuple[str, str]]) -> str:
    for old, new in parts:
        name = name.replace(old, new)
    return name


def unsharded_shape(module: Any, shape: tuple[int, ...], tensor_parallel: int) -> tuple[int, ...]:
    """Return the shape that a rank's parameter of `shape` has in the model's files."""
    vocabulary, experts = getattr(module, "org_vocab_size", None), getattr(module, "moe_config", None)
    if vocabulary is not None:
        return (vocabulary, *shape[1:])
    if experts is not None:  # [E, 2 I, H] and [E, H, I], sharded over ranks; some kernels pad them
        inner, hidden = experts.intermediate_size, experts.hidden_dim_unpadded
        is_down = shape[1:] == (experts.hidden_dim, experts.intermediate_size_per_partition)
        return (experts.num_logical_experts, *((hidden, inner) if is_down else (2 * inner, hidden)))
    if tensor_parallel == 1:
        return shape
    output_size, num_kv_heads = getattr(module, "output_size", None), getattr(module, "total_num_kv_heads", None)
    if num_kv_heads is not None:
        # vLLM's own value counts a key-value head once per rank with a copy.
        output_size = module.total_num_heads * module.head_size + num_kv_heads * (module.head_size + module.v_head_size)
    full = (output_size, getattr(module, "input_size", None), *shape[2:])
    return tuple(own if size is None else size for own, size in zip(shape, full, strict=False))
