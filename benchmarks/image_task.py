"""Held-out pass@1 of a task that needs its image: SmolLM2's text model with a new, small vision tower.

`python benchmarks/image_task.py --folder FOLDER` after `tools/setup.sh cpu,demo`. Each colour has a digit, drawn by the
seed, which is the answer. All questions are alike and name the four digits, so only the image tells the answer. First
the tower learns, without the text model, to give the embedding of the colour's name. Then GRPO trains text model, tower
and connector. The eval set `shuffled` has the same rows with the images of others. A run that is complete in FOLDER is
read, not run again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from common import load_average, median, print_table
from untuned_tasks import completed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_grpo.demo.smollm2 import write_smollm2
from hpc_grpo.metrics.evals import with_interval
from hpc_grpo.run.progress import read_metrics
from tests.support.tiny_vision import CHAT, TOKENS, write_processor

COLOURS, DIGITS = ("red", "green", "blue", "white"), "123456789"
QUESTION = "Which of the codes {} has this colour? Code: "
_SIDE, _PROMPTS = 56, 16


@click.command()
@click.option("--folder", default="runs/image_task", type=click.Path(path_type=Path), show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--lr", default=2e-5, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, steps: int, lr: float, seed: int) -> None:
    """Train, and print pass@1 before and after, with images and with those of other rows."""
    print(f"Machine: {load_average()}")
    folder = folder.resolve() / f"seed-{seed}"
    if not (folder / "model").is_dir():
        write_model(folder, seed)
    codes = dict(zip(COLOURS, random.Random(seed).sample(DIGITS, len(COLOURS)), strict=True))
    for name, size in (("train", _PROMPTS * steps), ("eval", 64)):
        write_rows(folder, name, size, codes)
    metrics = read_metrics(completed(config_of(folder, steps, lr, seed)).metrics)
    rows = [
        (name, *(with_interval(metrics[step], f"{prefix}/pass@1") for step in (0, max(metrics))))
        for name, prefix in (("their own", "eval"), ("of other rows", "eval/shuffled"))
    ]
    step = median([line["time/step_s"] for number, line in metrics.items() if number])
    print_table(f"codes {codes}, {steps} steps of {step:.0f} s", ("images", "pass@1 before", "after"), rows)


def write_model(folder: Path, seed: int) -> None:
    """Write an Idefics3 of SmolLM2's text model and a tower that gives the embeddings of the colours' names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    from transformers import Idefics3Processor as Processor

    write_smollm2(folder / "smollm2")
    text = AutoModelForCausalLM.from_pretrained(folder / "smollm2", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS["idefics3"]})
    tokenizer.chat_template = CHAT.replace("IMAGE", "<image>")
    text.resize_token_embeddings(len(tokenizer))
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": _SIDE, "patch_size": 14, "initializer_range": 0.15,
    }  # fmt: skip
    described = AutoConfig.for_model(
        "idefics3", text_config=text.config.to_dict(), vision_config=vision, scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(described)
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    write_processor(folder / "model", "idefics3", tokenizer)
    names = [tokenizer(f" {colour}", add_special_tokens=False).input_ids[0] for colour in COLOURS]
    _align(model, Processor.from_pretrained(folder / "model"), names, random.Random(seed))
    model.save_pretrained(folder / "model")


def _align(model: Any, processor: Any, names: Sequence[int], drawn: random.Random) -> None:
    """Train tower and connector alone: each of an image's features nears the embedding of its colour's name."""
    import torch

    wanted = model.get_input_embeddings().weight.detach()[list(names)]
    trained = [*model.model.vision_model.parameters(), *model.model.connector.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
    for _ in range(200):
        chosen = [drawn.randrange(len(COLOURS)) for _ in range(_PROMPTS)]
        pictures = [[draw(drawn, COLOURS[number])] for number in chosen]
        given = processor(images=pictures, text=["<image>"] * _PROMPTS, return_tensors="pt")
        pixels = {name: own for name, own in given.items() if name.startswith("pixel")}
        features = model.model.get_image_features(**pixels, return_dict=True).pooler_output
        loss = (features - wanted[chosen].unsqueeze(1)).square().mean() / wanted.var()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def draw(drawn: random.Random, colour: str) -> Any:
    """Return a picture of a rectangle, anywhere on grey noise."""
    from PIL import Image

    picture = Image.effect_noise((_SIDE, _SIDE), drawn.randrange(20, 100)).convert("RGB")
    width, height = drawn.randrange(24, _SIDE), drawn.randrange(24, _SIDE)
    at = drawn.randrange(_SIDE - width), drawn.randrange(_SIDE - height)
    picture.paste(colour, (*at, at[0] + width, at[1] + height))
    return picture


def write_rows(folder: Path, name: str, count: int, codes: dict[str, str]) -> None:
    """Write as many rows of each colour, in turn, as NAME.jsonl; and with images shuffled, as NAME-shuffled.jsonl."""
    drawn = random.Random(f"{name} {codes}")
    colours = [COLOURS[number % len(COLOURS)] for number in range(count)]
    images = [f"{name}-{number}.png" for number in range(count)]
    for colour, image in zip(colours, images, strict=True):
        draw(drawn, colour).save(folder / image)
    question = QUESTION.format(", ".join(sorted(codes.values())))
    for file, shown in ((name, images), (f"{name}-shuffled", drawn.sample(images, count))):
        rows = zip(colours, shown, strict=True)
        lines = [json.dumps({"question": question, "answer": codes[colour], "image": image}) for colour, image in rows]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")


def config_of(folder: Path, steps: int, lr: float, seed: int) -> dict[str, Any]:
    return {
        "run": {"name": f"run-{steps}-{lr:g}", "root": str(folder), "seed": seed},
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu", "train_vision": True},
        "data": {
            "train": {"path": str(folder / "train.jsonl")},
            "eval": {"path": str(folder / "eval.jsonl")},
            "eval_sets": {"shuffled": {"path": str(folder / "eval-shuffled.jsonl")}},
            "images": "image",
            "max_prompt_tokens": 32,
            "shuffle": False,
        },
        "rewards": [{"name": "exact"}],
        "rollout": {"prompts_per_step": _PROMPTS, "group_size": 8, "max_new_tokens": 1},
        "engine": {"engines_per_node": 1, "num_threads": 2, "kv_cache_gib": 0.25, "vllm": {"max_num_seqs": 64}},
        "train": {
            "total_steps": steps,
            "lr": lr,
            "warmup_steps": 4,
            "zero_stage": 1,
            "max_tokens_per_microbatch": 512,
            "num_threads": 2,
        },
        "checkpoint": {"every": None, "keep_last": 1},
        "eval": {"every": f"{steps} steps", "num_samples": 4, "reward": "exact"},
        "launch": {"object_store_gib": 0.25},
    }


if __name__ == "__main__":
    main()
