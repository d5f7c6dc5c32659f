"""Models of images and text that are made in a moment, with processors that read a token for each byte."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None, "initializer_range": 0.15,
}  # fmt: skip
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TOKENS = {
    "idefics3": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_ROWS],
    "qwen2_5_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
}


def colour_image(colour: str | tuple[int, int, int], size: tuple[int, int] = (56, 56), kind: str = "PNG") -> bytes:
    """Return the file of an image of one colour, `size` wide and high."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def noise_image(width: int, height: int) -> bytes:
    """Return the file of an image of which no two parts are alike."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_colours(
    folder: Path, codewords: Mapping[str, int], num_items: int, *, shuffled: bool = False, odd: bool = False
) -> Path:
    """Write JSON lines of images and codewords; `shuffled`: an image says nothing of its codeword.

    Images have shades of the colours. No image is also one of the other value of `odd`.
    """
    import json
    import random

    from PIL import ImageColor

    drawn = random.Random(num_items)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(num_items):
        colour = drawn.choice([*codewords])
        shown = ImageColor.getrgb(drawn.choice([*codewords]) if shuffled else colour)
        red, green, blue = (abs(channel - 2 * drawn.randrange(30) - odd) for channel in shown[:3])
        image = colour_image((red, green, blue), (40 + drawn.randrange(40), 56))
        (folder / f"{number}.png").write_bytes(image)
        lines.append(json.dumps({"question": "code?", "image": f"{number}.png", "answer": codewords[colour]}))
    (folder / "colours.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "colours.jsonl"


def write_vision_model(folder: Path, kind: str = "idefics3", seed: int = 0, **text: Any) -> Path:
    """Write a model of random weights in float32 with its processor's files; returns its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from hpc_grpo.demo.model import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS[kind]})
    ids = dict(zip(TOKENS[kind], tokenizer.convert_tokens_to_ids(TOKENS[kind]), strict=True))
    settings = {**_TEXT, "vocab_size": len(tokenizer), **text}
    if kind == "idefics3":
        image, vision = "<image>", {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 56, "patch_size": 14, "initializer_range": 0.15,
        }  # fmt: skip
        described = AutoConfig.for_model(
            kind, text_config={"model_type": "llama", **settings}, vision_config=vision, scale_factor=2,
            image_token_id=ids[image], pad_token_id=0, tie_word_embeddings=True,
        )  # fmt: skip
        described.text_config.tie_word_embeddings = True
    else:
        image, vision = "<|image_pad|>", {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.15,
        }  # fmt: skip
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
        described = AutoConfig.for_model(
            kind, text_config={**settings, "rope_parameters": rope}, vision_config=vision, image_token_id=ids[image],
            video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
        )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(described)
    model.save_pretrained(folder)
    tokenizer.chat_template = CHAT.replace(
        "IMAGE", image if kind == "idefics3" else f"<|vision_start|>{image}<|vision_end|>"
    )
    write_processor(folder, kind, tokenizer)
    return folder


def write_processor(folder: Path, kind: str, tokenizer: Any) -> None:
    if kind == "idefics3":
        from transformers import Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 56}, do_image_splitting=False
        )
        Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    else:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokenizer.save_pretrained(folder)
        size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
        Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, size=size).save_pretrained(folder)
