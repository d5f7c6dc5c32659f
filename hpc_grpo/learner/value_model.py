"""The value model of a critic: a causal language model's trunk with one number for a head, as it is loaded and written.

It is written as transformers' token classifiers of one label are, which `AutoModelForTokenClassification` loads: the
logit at a token is the value of the state after it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_grpo.config import Config
from hpc_grpo.data.tokenizer import model_folder
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.export import copy_tokenizer, whole_weights
from hpc_grpo.learner.model import PolicyModel, parameter_specs
from hpc_grpo.learner.setup import load_trained
from hpc_grpo.system.say import say


class ValueHead(nn.Module):  # type: ignore[misc]
    """Takes the place of the model's output layer: one float32 value per state, 0.0 before it is trained."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return the values `[C]` of `hidden` `[C, D]`; what comes next in the sequence is no matter."""
        return hidden.float() @ self.weight.float()


def load_value_model(config: Config, device: Any) -> PolicyModel:
    """Load `model.path` with a head of zeros, or the critic at `task.critic`. Raises ConfigError where that is none."""
    path = config.ppo.critic
    model = load_trained(config, device, path, "model.path" if path is None else "task.critic")
    language_model = model.language_model
    head = ValueHead(language_model.config.hidden_size)
    if path is not None:
        head.weight.data.copy_(_read_head(path, language_model.base_model_prefix, len(head.weight)))
    language_model.set_output_embeddings(head)
    return model


def export_value_model(model: PolicyModel, config: Config, folder: Path) -> None:
    """Write the value model into `folder` on rank 0, its head in float32: a collective under ZeRO-3.

    Leaves it out, and says so, where transformers has no token classifier of the architecture.
    """
    from transformers import AutoModelForTokenClassification

    language_model = model.language_model
    trunk = f"{language_model.base_model_prefix}."
    specs = [spec for spec in parameter_specs(model, config.model.dtype) if spec.name.startswith(trunk)]
    weights = whole_weights(model, specs)
    head = _whole(language_model.get_output_embeddings().weight)
    if dist.get_rank() != 0:
        return
    settings = copy.deepcopy(language_model.config)
    if type(settings) not in AutoModelForTokenClassification._model_mapping:
        say(f"The critic is not exported: transformers has no token classifier of {type(language_model).__name__}.")
        return
    settings.num_labels, settings.classifier_dropout = 1, 0.0
    with torch.device("meta"):
        written = AutoModelForTokenClassification.from_config(settings, dtype=getattr(torch, config.model.dtype))
    for name, parameter in written.named_parameters():
        if not name.startswith(trunk):
            weights[name] = head.reshape(parameter.shape) if parameter.dim() == 2 else torch.zeros(parameter.shape)
    written.save_pretrained(folder, state_dict=weights)
    copy_tokenizer(config, folder)


def _whole(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the head in host memory, float32."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().float().cpu().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().float().cpu().clone()


def _read_head(path: str, prefix: str, hidden_size: int) -> Tensor:
    """Read the head `[D]` of a token classifier of one label. Raises ConfigError where there is none."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(model_folder(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if not name.startswith(f"{prefix}.")]  # noqa: SIM118 - no dict
            found |= {name: tensors.get_tensor(name).float() for name in names}
    weights = [each for each in found.values() if tuple(each.shape) == (1, hidden_size)]
    if len(weights) != 1 or any(each.any() for each in found.values() if each.dim() == 1):
        raise ConfigError(
            f"task.critic = {path} holds no value head, one row of {hidden_size} numbers without a bias, but "
            f"{', '.join(sorted(found)) or 'a trunk alone'}. Give the critic folder of an export, or null."
        )
    return weights[0][0]
