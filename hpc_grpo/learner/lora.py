"""LoRA (arXiv:2106.09685) with peft: freezes the policy and trains a low-rank product beside each linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.model import ADAPTER, PolicyModel, adapter_parameters, score
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.learner.parts import LearnerPart


class Lora(LearnerPart):
    """Puts peft's layers into the policy. Engines and exports receive the adapter or merged weights."""

    def change_policy(self, policy: PolicyModel) -> None:
        """Freeze the policy and add adapters, the same on every rank.

        Raises ConfigError for targets that match no linear layer, and for a `model.adapter` that does not fit.
        """
        from peft import inject_adapter_in_model

        policy.requires_grad_(False)
        language_model, settings = policy.language_model, peft_config(self.config)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(self.config.run.seed)
                inject_adapter_in_model(settings, language_model)
        except ValueError as error:
            raise ConfigError(f"lora.targets = {self.config.lora.targets}: {error}") from error  # type: ignore[union-attr]
        for name, layer in adapted_layers(policy):
            if not isinstance(layer.base_layer, nn.Linear):
                raise ConfigError(f"lora.targets: {name} is a {type(layer.base_layer).__name__}, not a linear layer.")
            layer.merged_weight = partial(merged_weight, layer)
        if self.config.model.adapter is not None:
            _load_adapter(policy, Path(self.config.model.adapter))


class BaseReference(LearnerPart):
    """The reference of the KL under LoRA: the policy with its adapter off. It needs no second model."""

    def change_policy(self, policy: PolicyModel) -> None:
        self._policy = policy

    def loss_inputs(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        with adapter_off(self._policy):
            return {"ref_logprobs": score(self._policy, batch)}


def peft_config(config: Config) -> Any:
    """Return section `lora` as peft's LoraConfig."""
    from peft import LoraConfig

    lora, base = config.lora, config.model.path
    assert lora is not None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        lora_dropout=lora.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).absolute()) if Path(base).is_dir() else base,
    )


def adapted_layers(policy: PolicyModel) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers under the names of the layers that they replace."""
    for name, module in policy.language_model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


@contextmanager
def adapter_off(policy: PolicyModel) -> Iterator[None]:
    """Compute with the base model, without the adapter, inside the block.

    Multiplies the adapter by 0 instead of skipping it: ZeRO-3 expects the same modules in every pass.
    """
    layers = [layer for _, layer in adapted_layers(policy)]
    scalings = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[ADAPTER] = scaling


def merged_weight(layer: Any) -> Tensor:
    """Return base + scaling * B A in float32: in bfloat16 the sum would lose most of a small product."""
    low, high = layer.lora_A[ADAPTER].weight.float(), layer.lora_B[ADAPTER].weight.float()
    return layer.base_layer.weight.float() + layer.scaling[ADAPTER] * (high @ low)


def write_adapter(config: Config, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter in PEFT's format, with the path or name of its base model."""
    from safetensors.torch import save_file

    save_file(dict(weights), folder / "adapter_model.safetensors", {"format": "pt"})
    settings = peft_config(config)
    settings.target_modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in weights}
    settings.inference_mode = True
    settings.save_pretrained(folder)


def _load_adapter(policy: PolicyModel, folder: Path) -> None:
    from safetensors.torch import load_file

    ours, theirs = adapter_parameters(policy), load_file(folder / "adapter_model.safetensors")
    own_shapes, shapes = ({name: tuple(each.shape) for name, each in side.items()} for side in (ours, theirs))
    if differing := sorted(name for name, _ in own_shapes.items() ^ shapes.items()):
        name = differing[0]
        raise ConfigError(
            f"model.adapter = {folder} does not fit section lora and model.path: {name} has shape {shapes.get(name)}, "
            f"but needs {own_shapes.get(name)}. Give an adapter of this model, and set its rank and targets in lora."
        )
    with torch.no_grad():
        for name, own in ours.items():
            own.copy_(theirs[name])
