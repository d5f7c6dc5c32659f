"""A mixture of experts made of SmolLM2-135M-Instruct, with routers that are near a tie.

Each MLP becomes four experts, copies with noise, two for a token. The rows of a router are almost equal.
"""

from __future__ import annotations

from pathlib import Path

from hpc_grpo.demo.smollm2 import write_smollm2

NUM_EXPERTS, TOP_K = 4, 2
EXPERT_NOISE, ROUTER_SCALE, ROUTER_NOISE = 0.1, 0.02, 0.03
"""The noises are relative to the standard deviation of a weight. ROUTER_SCALE is that of a router's row."""


def write_models(folder: Path) -> dict[str, Path]:
    """Return the folders of the dense model and of the Mixtral, in float32; write what is not there."""
    paths = {name: folder / name for name in ("dense", "experts")}
    if not paths["dense"].is_dir():
        write_smollm2(paths["dense"])
    if not paths["experts"].is_dir():
        write_experts(paths["dense"], paths["experts"])
    return paths


def write_experts(dense: Path, folder: Path) -> None:
    """Write the Mixtral made of the dense model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

    source = AutoModelForCausalLM.from_pretrained(dense)
    settings = source.config.to_dict()
    settings = {key: own for key, own in settings.items() if key not in ("model_type", "architectures")}
    model = MixtralForCausalLM(
        MixtralConfig(**settings, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, sliding_window=None)
    )
    model.load_state_dict(source.state_dict(), strict=False)
    drawn = torch.Generator().manual_seed(0)
    for layer, of_dense in zip(model.model.layers, source.model.layers, strict=True):
        mlp, experts = of_dense.mlp, layer.mlp.experts
        with torch.no_grad():
            row, rows = (torch.randn(count, mlp.gate_proj.in_features, generator=drawn) for count in (1, NUM_EXPERTS))
            layer.mlp.gate.weight.copy_(ROUTER_SCALE * (row + ROUTER_NOISE * rows))
            for target, weight in (
                (experts.gate_up_proj, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
                (experts.down_proj, mlp.down_proj.weight),
            ):
                target.copy_(weight + torch.randn(target.shape, generator=drawn) * (EXPERT_NOISE * weight.std()))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
