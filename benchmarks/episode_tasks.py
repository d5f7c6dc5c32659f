"""Held-out pass@1 of SmolLM2-135M-Instruct in episodes of several turns, before and after training.

`python benchmarks/episode_tasks.py --folder FOLDER` after `tools/setup.sh cpu,demo`: a number that is guessed with
hints, digits that are reversed with a second try, sums by a tool. A run that is complete in FOLDER is read, not run
again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from common import load_average, print_table
from untuned_tasks import HEADER, completed, row

from hpc_grpo.demo.smollm2 import write_smollm2

_FILE = Path(__file__).resolve().with_name("episode_environments.py")


def _played(name: str, turns: int) -> dict[str, Any]:
    rows = {"path": f"{_FILE}:games", "prompt_field": None, "answer_field": None}
    return {
        "environment": {"name": f"{_FILE}:{name}", "max_turns": turns, "max_tokens": 96},
        "data": {
            "train": rows | {"args": {"count": 400}},
            "eval": rows | {"args": {"count": 32, "first": 10_000}},
            "system_prompt": "Play.",
            "max_prompt_tokens": 160,
        },
        "rollout": {"max_new_tokens": 8},
    }


TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "guess": (24, _played("GuessTheNumber", 3)),
    "reverse": (12, _played("ReverseDigits", 2)),
    "sums": (
        10,
        {
            "environment": {"name": "tools", "args": {"tools": [f"{_FILE}:add"]}, "max_turns": 2, "max_tokens": 128},
            "rewards": [{"name": "math"}],
            "data": {
                "train": {"path": f"{_FILE}:sums", "messages_field": "messages", "args": {"count": 400, "seed": 0}},
                "eval": {"path": f"{_FILE}:sums", "messages_field": "messages", "args": {"count": 32, "seed": 1}},
                "system_prompt": "Use the tool.",
            },
            "rollout": {"max_new_tokens": 56},
        },
    ),
}


@click.command()
@click.option("--folder", default="runs/episode_tasks", type=click.Path(path_type=Path), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--only", multiple=True, type=click.Choice([*TASKS]), help="These tasks; default: all three.")
def main(folder: Path, seed: int, only: tuple[str, ...]) -> None:
    """Train on each task in turn, and print what each run has learned."""
    print(f"Machine: {load_average()}")
    model = folder.resolve() / "smollm2"
    if not model.is_dir():
        write_smollm2(model)
    rows = [row(f"{task}, seed {seed}", completed(_config(model, task, seed))) for task in only or TASKS]
    print_table("Steps of 4 x 8 episodes, lr 2e-5", HEADER, rows)


def _config(model: Path, task: str, seed: int) -> dict[str, Any]:
    steps, own = TASKS[task]
    return {
        **own,
        "run": {"name": f"{task}-{seed}", "root": str(model.parent), "seed": seed},
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "rollout": own["rollout"] | {"prompts_per_step": 4, "group_size": 8, "drop_zero_variance": True},
        "engine": {"engines_per_node": 1, "num_threads": 2, "vllm": {"max_num_seqs": 64}},
        "train": {
            "total_steps": steps,
            "lr": 2e-5,
            "zero_stage": 1,
            "max_tokens_per_microbatch": 2048,
            "num_threads": 2,
        },
        "checkpoint": {"every": None, "keep_last": 1},
        "eval": {"every": f"{steps} steps", "num_samples": 2},
        "launch": {"object_store_gib": 0.25},
    }


if __name__ == "__main__":
    main()
