"""Take whole steps of TRL's GRPOTrainer; a helper of sides.py, which runs it in a process of its own.

`trl_steps.py MODEL SHAPE`; SHAPE is JSON. Prints JSON: the seconds of every step, and the tokens sampled in it.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from typing import Any

import click
from common import REWARDS, read_rows


@click.command()
@click.argument("model")
@click.argument("shape")
def main(model: str, shape: str) -> None:
    seconds, tokens = steps(model, json.loads(shape))
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


def steps(model: str, shape: dict[str, Any]) -> tuple[list[float], list[int]]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(shape["threads"])
    ends, tokens = [time.perf_counter()], []

    class StepClock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **fields: Any
    ) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return REWARDS[shape["reward"]](prompts, completions, **fields)

    num_completions = shape["prompts"] * shape["group"]
    rows = shape["microbatch"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=num_completions // rows,
            num_generations=shape["group"],
            max_completion_length=shape["tokens"],
            generation_kwargs={"min_new_tokens": shape["tokens"]} if shape["is_fixed"] else {},
            max_steps=shape["steps"] + 1,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(read_rows(shape["data"]) * (shape["steps"] + 1)),
            callbacks=[StepClock()],
        )
        trainer.train()
    # The first step also warms up.
    return [end - start for start, end in itertools.pairwise(ends[1:])], tokens[1:]


if __name__ == "__main__":
    main()
