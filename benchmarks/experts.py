"""Held-out pass@1 of the demo's task with a mixture of experts made of SmolLM2-135M-Instruct.

`python benchmarks/experts.py --folder FOLDER` after `tools/setup.sh cpu,demo`. Each MLP of the model becomes four
experts, copies with noise, two for a token. The rows of a router are almost equal, so experts are near a tie. All other
settings are the demo's. A run that is complete in FOLDER is read, not run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml
from common import load_average, median, print_table
from untuned_tasks import completed

from hpc_grpo.config.load import find_config
from hpc_grpo.demo.smollm2 import write_smollm2
from hpc_grpo.metrics.evals import with_interval
from hpc_grpo.metrics.record import PASS_AT_1
from hpc_grpo.run.progress import read_metrics

NUM_EXPERTS, TOP_K = 4, 2
EXPERT_NOISE, ROUTER_SCALE, ROUTER_NOISE = 0.1, 0.02, 0.03
"""The noises are relative to the standard deviation of a weight. ROUTER_SCALE is that of a router's row."""

_MISMATCH = ("logprob_abs_diff_mean", "logprob_abs_diff_max", "canary")


@click.command()
@click.option("--folder", default="runs/experts", type=click.Path(path_type=Path), show_default=True)
@click.option("--model", default="experts", type=click.Choice(["dense", "experts"]), show_default=True)
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]), show_default=True)
@click.option("--steps", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, model: str, dtype: str, steps: int, seed: int) -> None:
    """Train, and print the rewards of all steps, pass@1 before and after, and the mismatch of engine and learner."""
    folder = folder.resolve()
    config: dict[str, Any] = yaml.safe_load(find_config("local/demo").read_text())
    config["run"] = {"name": f"{model}-{dtype}-{steps}-{seed}", "root": str(folder), "seed": seed}
    config["model"] |= {"path": str(write_models(folder)[model]), "dtype": dtype}
    config["train"] |= {"total_steps": steps, "max_tokens_per_microbatch": 512}
    config["eval"]["every"] = steps
    print(f"Machine: {load_average()}")
    metrics = read_metrics(completed(config).metrics)
    trained = [line for step, line in metrics.items() if step]
    rewards = " ".join(f"{line['reward/mean']:.2f}" for line in trained)
    apart = [f"{median([line[f'mismatch/{name}'] for line in trained]):.2g}" for name in _MISMATCH]
    row = (
        *(with_interval(metrics[step], PASS_AT_1) for step in (0, steps)),
        *apart,
        f"{median([line['time/step_s'] for line in trained]):.1f} s",
    )
    print(f"Rewards: {rewards}")
    print_table(f"{model}, {dtype}, {steps} steps", ("pass@1 before", "after", *_MISMATCH, "step"), [row])


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


if __name__ == "__main__":
    main()
