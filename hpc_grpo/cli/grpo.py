"""The command with the options of a plain `train_grpo.py`: it writes a config, trains with it, and copies the model.

The file `train_grpo.py` beside the package calls the command. Option defaults are those of the TRL script it replaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.hub import copy_export
from hpc_grpo.cli.init import node_split
from hpc_grpo.cli.options import OVERRIDES, echo
from hpc_grpo.cli.request import load_request
from hpc_grpo.cli.train import run_until_over
from hpc_grpo.config import to_yaml
from hpc_grpo.errors import EXIT_COMPLETE, ConfigError
from hpc_grpo.launch.place.local import LocalPlace
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir

_GPUS_OF_A_LEARNER = 4
"""One learner is started for this many GPUs. All other GPUs sample, which takes most of a step's time."""

_REWARDS = {"correctness": "exact"}
"""Reward of that script -> our name. The script's `correctness` compares texts."""

_UNSLOTH_RANK = 16
_NO_UNSLOTH = (
    "--use_unsloth: trains a LoRA adapter, by peft and DeepSpeed on all GPUs. Packing, vLLM's sampling and gradient "
    "checkpointing do not need this option."
)


@click.command()
@click.option("--model", required=True, help="A Hugging Face model: a folder, or a name.")
@click.option("--dataset", required=True, help="A .json or .jsonl file, or another value of data.train.path.")
@click.option("--reward_function", required=True, help="correctness, strict_format, … or module:function.")
@click.option("--max_steps", type=click.IntRange(1), default=500, show_default=True)
@click.option("--output_dir", type=click.Path(path_type=Path), default="outputs", show_default=True)
@click.option(
    "--preprocessing", "--preprocessing_pipeline",
    type=click.Choice(["generic", "deepseek"]), default="generic", show_default=True,
    help="generic: the text of `prompt`, unchanged; deepseek: a chat with DeepSeek-R1's prompt.",
)  # fmt: skip
@click.option("--learning_rate", type=click.FloatRange(0, min_open=True), default=5e-6, show_default=True)
@click.option("--batch_size", type=click.IntRange(1), default=1, show_default=True, help="Prompts per step.")
@click.option("--num_generations", type=click.IntRange(2), default=4, show_default=True, help="Completions per prompt.")
@click.option("--max_prompt_length", type=click.IntRange(1), default=256, show_default=True, help="In tokens.")
@click.option("--max_completion_length", type=click.IntRange(1), default=128, show_default=True, help="In tokens.")
@click.option("--use_unsloth", is_flag=True, help="Train a LoRA adapter.")
@click.option("--lora_r", type=click.IntRange(1, 512), help=f"Rank of the LoRA adapter; default: {_UNSLOTH_RANK}.")
@OVERRIDES
def grpo(overrides: tuple[str, ...], **given: Any) -> None:
    """Train by GRPO like train_grpo.py, and write the model and its tokenizer to --output_dir.

    Reads the columns `prompt` and `answer`. Writes OUTPUT_DIR/train_grpo.yaml and trains with it, like `hpc-grpo
    train`, in OUTPUT_DIR/run. The same command resumes an interrupted run. KEY=VALUE changes any other key.
    """
    if given["use_unsloth"]:
        echo(_NO_UNSLOTH, err=True)
    if given["reward_function"] in _REWARDS:
        echo(f"--reward_function {given['reward_function']} is {_REWARDS[given['reward_function']]} here.", err=True)
    output = Path(os.path.expanduser(given["output_dir"])).absolute()
    file = output / "train_grpo.yaml"
    write_atomic(file, to_yaml(config_values(given, output, LocalPlace().node_resources().num_gpus)))
    run = RunDir(load_request(str(file), overrides).config.run_path)
    code = run_until_over([sys.executable, "-m", "hpc_grpo.cli", "train", str(file), *overrides])
    if code == EXIT_COMPLETE:
        hand_over(run, output)
        echo(f"Model and tokenizer: {output}")
    sys.exit(code)


def config_values(given: Mapping[str, Any], output: Path, num_gpus: int) -> dict[str, Any]:
    """Return the config of the options `given`, for a machine with `num_gpus` GPUs; 0 trains in float32 on its CPUs."""
    learners = max(1, num_gpus // _GPUS_OF_A_LEARNER)
    longest = given["max_prompt_length"] + given["max_completion_length"]
    rank = given["lora_r"] or (_UNSLOTH_RANK if given["use_unsloth"] else None)
    return {
        **({"lora": {"rank": rank}} if rank else {}),
        "run": {"name": "run", "root": str(output)},
        "model": {"path": given["model"], **({} if num_gpus else {"device": "cpu", "dtype": "float32"})},
        "data": {
            "train": {"path": given["dataset"], "prompt_field": "prompt", "answer_field": "answer"},
            "template": "chat" if given["preprocessing"] == "deepseek" else "plain",
            "preprocessing": given["preprocessing"],
            "max_prompt_tokens": given["max_prompt_length"],
            "drop_long_prompts": True,
        },
        "rewards": [{"name": _REWARDS.get(given["reward_function"], given["reward_function"])}],
        "rollout": {
            "prompts_per_step": given["batch_size"],
            "group_size": given["num_generations"],
            "max_new_tokens": given["max_completion_length"],
        },
        **node_split(learners, max(1, num_gpus - learners), colocated=num_gpus == 1),
        "train": {
            "total_steps": given["max_steps"],
            "lr": given["learning_rate"],
            "max_tokens_per_microbatch": max(8192, longest),
        },
    }


def hand_over(run: Any, output: Path) -> None:
    """Copy the files of the run's newest export into `output`. Raises ConfigError without an export."""
    export = run.latest_export()
    if export is None:
        raise ConfigError(f"{run.path} is complete, but has no export. `hpc-grpo model export {run.path}` writes one.")
    copy_export(export, output)
