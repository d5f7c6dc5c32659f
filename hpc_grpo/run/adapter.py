"""Read the settings of LoRA adapters in PEFT's format from adapter_config.json, and check them. Without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.train import LoraConfig
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.system.hugging_face import linear_layers, read_header

_SETTINGS = "adapter_config.json"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "modules_to_save": (None, []), "use_dora": (False,),
    "use_rslora": (False,), "rank_pattern": ({},), "alpha_pattern": ({},), "lora_bias": (False,),
    "layer_replication": (None,), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
"""Settings of an adapter -> their supported values. Other inits, such as PiSSA, change the base model too."""


def is_adapter(path: str) -> bool:
    folder = Path(path)
    return (folder / _SETTINGS).is_file() and not (folder / "config.json").is_file()


def read_adapter(path: str) -> tuple[str, LoraConfig]:
    """Return the base that an adapter names, and section `lora` for it. Raises ConfigError for other kinds.

    For all-linear, peft writes the path of each layer. The section has the names of the layers.
    """
    file = Path(path) / _SETTINGS
    try:
        values = json.loads(file.read_text())
        targets = values["target_modules"]
        if isinstance(targets, list):
            targets = sorted({path.rpartition(".")[2] for path in targets})
        elif targets != "all-linear":
            raise ValueError(f"target_modules = {targets!r} is a pattern. Write a list of names of layers")
        lora = LoraConfig(rank=values["r"], alpha=values["lora_alpha"], targets=targets, publish="adapter")
        base = values["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as the settings of a LoRA adapter: {error}") from error
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{file} names no base. Set its base_model_name_or_path to the model of the adapter.")
    for key, allowed in _PLAIN.items():
        if (value := values.get(key, allowed[0])) not in allowed:
            raise ConfigError(f"{file}: {key} = {value!r} is not supported. Give an adapter with {key} = {allowed[0]}.")
    return base, lora


def with_model(config: Config, path: str) -> Config:
    """Return `config` with the model at `path`, or with an adapter at `path` and the base that it names."""
    base, lora = read_adapter(path) if is_adapter(path) else (path, None)
    model = config.model.model_copy(update={"path": base, "adapter": path if lora else None})
    return config.model_copy(update={"model": model, "lora": lora})


def refuse_wrong_lora(config: Config, folder: Path, working_dir: Path = Path()) -> None:
    """Raise ConfigError if a run cannot train `lora` on the model in `folder`, or begin with `model.adapter`.

    Does not check layer names if the weights are not safetensors files.
    """
    lora, adapter = config.lora, config.model.adapter
    if lora is None:
        return
    if config.publishes_adapter and config.placement.colocate:
        raise ConfigError(
            "lora.publish = adapter needs engines that keep the base model, but with placement.colocate engines free "
            "its memory for learners. Set lora.publish=merged."
        )
    known = linear_layers(folder)
    leaves = {name.rpartition(".")[2] for name in known}
    for target in [] if lora.targets == "all-linear" else lora.targets:
        if known and target not in leaves:
            raise ConfigError(
                f"lora.targets has {target!r}, which is no linear layer of model.path = {config.model.path}"
                f"{nearest(target, sorted(leaves))} Its layers: {', '.join(sorted(leaves))}; or all-linear."
            )
    if adapter is None:
        return
    base, theirs = read_adapter(str(working_dir / adapter))
    targets = leaves if lora.targets == "all-linear" else {*lora.targets}
    for key, own, other in (
        ("rank", lora.rank, theirs.rank),
        ("alpha", lora.alpha, theirs.alpha),
        ("targets", sorted(targets), sorted(leaves if theirs.targets == "all-linear" else theirs.targets)),
    ):
        if own != other and (known or key != "targets"):
            raise ConfigError(f"lora.{key} = {own}, but model.adapter = {adapter} has {other}. Set lora.{key}={other}.")
    if Path(base).name != Path(config.model.path).name:
        raise ConfigError(
            f"model.adapter = {adapter} is an adapter of {base}, and model.path = {config.model.path}. Set "
            f"model.path={base}, give an adapter of this model, or correct base_model_name_or_path in its {_SETTINGS}."
        )
    file = working_dir / adapter / "adapter_model.safetensors"
    if not file.is_file() or not read_header(file).shapes:
        raise ConfigError(
            f"{file}, the adapter's weights, is missing or empty. Save the adapter with peft's save_pretrained, which "
            f"writes this file; adapter_model.bin is not read."
        )
