"""The start-up contract: learner and engine must mean the same parameters before the first publish.

vLLM fuses projections (q, k and v into one), pads vocabularies and shards tensors, so the comparison maps each
engine parameter back to the Hugging Face names that fill it and compares sizes along the fused dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_grpo.types import ParameterSpec


def contract_differences(
    learner: Sequence[ParameterSpec],
    engine: Sequence[ParameterSpec],
    packed_modules: Mapping[str, Sequence[str]],
) -> list[str]:
    """Differences in words, one a line; empty when both sides agree.

    `engine` holds unsharded shapes in the engine's own (fused) names. `packed_modules` maps a fused module to the
    modules it holds, in order: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    remaining = {spec.name: spec for spec in learner}
    differences = []
    for expected in engine:
        parts = [remaining.pop(name, None) for name in _source_names(expected.name, packed_modules)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            missing = [n for n, p in zip(_source_names(expected.name, packed_modules), parts, strict=True) if p is None]
            differences.append(f"{', '.join(missing)}: the engine needs it, the learner does not publish it")
            continue
        if len({part.shape[1:] for part in found}) > 1:
            shapes = ", ".join(f"{part.name} {part.shape}" for part in found)
            differences.append(f"{expected.name}: learner shapes do not fit together: {shapes}")
            continue
        fused_shape = _fused_shape(found)
        if fused_shape != expected.shape:
            differences.append(f"{expected.name}: learner shape {fused_shape}, engine shape {expected.shape}")
        dtypes = {part.dtype for part in found}
        if dtypes != {expected.dtype}:
            differences.append(f"{expected.name}: learner dtype {sorted(dtypes)}, engine dtype {expected.dtype}")
    differences += [f"{name}: the learner publishes it, the engine has no such parameter" for name in remaining]
    return differences


def _fused_shape(parts: Sequence[ParameterSpec]) -> tuple[int, ...]:
    if len(parts) == 1:
        return parts[0].shape
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def engine_parameters(model: Any, vllm_config: Any) -> list[ParameterSpec]:
    """The parameters of a vLLM model in load format, unsharded and without vocabulary padding.

    Read from the metadata vLLM keeps for reloading, since processed weights may have been repacked; a tied
    lm_head is the embedding's own module and appears once.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    specs: list[ParameterSpec] = []
    seen: set[int] = set()
    tied = bool(getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False))
    for module_name, module in model.named_modules():
        if tied and module_name == "lm_head":
            continue
        recorded, _ = get_layerwise_info(module).restore_metadata
        live = dict(module.named_parameters(recurse=False))
        for name in live:
            if id(live[name]) in seen:
                continue
            seen.add(id(live[name]))
            tensor = recorded.get(name, live[name])
            shape = _unsharded_shape(module, name, tuple(tensor.shape), vllm_config)
            full_name = f"{module_name}.{name}" if module_name else name
            specs.append(ParameterSpec(full_name, shape, str(tensor.dtype).removeprefix("torch.")))
    return specs


def _unsharded_shape(module: Any, name: str, shape: tuple[int, ...], vllm_config: Any) -> tuple[int, ...]:
    vocabulary = getattr(module, "org_vocab_size", None)
    if vocabulary is not None:
        return (vocabulary, *shape[1:])
    world_size = vllm_config.parallel_config.tensor_parallel_size
    if world_size == 1:
        return shape
    sizes = {
        "output": (_output_size(module), 0),
        "input": (getattr(module, "input_size", None), 1),
    }
    unsharded = list(shape)
    for full, dimension in sizes.values():
        if full is not None and dimension < len(shape):
            unsharded[dimension] = full
    return tuple(unsharded)


def _output_size(module: Any) -> int | None:
    """Rows of a linear layer's weight in the model's files; None for other modules."""
    size: int | None = getattr(module, "output_size", None)
    num_kv_heads = getattr(module, "total_num_kv_heads", None)
    if num_kv_heads is not None:
        # vLLM's own counts a head of keys and values once for each rank that holds a copy of it.
        size = module.total_num_heads * module.head_size + num_kv_heads * (module.head_size + module.v_head_size)
    return size


def _source_names(name: str, packed_modules: Mapping[str, Sequence[str]]) -> list[str]:
    module, _, parameter = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    parts = packed_modules.get(leaf)
    if not parts:
        return [name]
    return [f"{parent}.{part}.{parameter}" for part in parts]
