"""Prompts with images: what a column may hold, where images stand, and which of them end a run before it starts."""

from __future__ import annotations

import base64
import io
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from hpc_grpo.config.load import load_values
from hpc_grpo.data.images import MAX_IMAGES, image_size, open_image
from hpc_grpo.data.loading import load_streams
from hpc_grpo.data.tokenizer import load_tokenizer
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import Prompt
from tests.support.configs import minimal_config
from tests.support.tiny_vision import colour_image, write_vision_model

RED, BLUE = colour_image("red"), colour_image("blue", (84, 56), "JPEG")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


class Loader:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self.folder = model, folder
        (folder / "red.png").write_bytes(RED)
        (folder / "blue.jpg").write_bytes(BLUE)

    def __call__(self, *rows: Mapping[str, Any], **data: Any) -> list[Prompt]:
        """Load rows as a run does, from JSON lines."""
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.load({"path": str(self.folder / "rows.jsonl")}, **data)

    def load(self, train: Mapping[str, Any], **data: Any) -> list[Prompt]:
        train = {**train, **{key: data.pop(key) for key in ("messages_field", "max_items") if key in data}}
        values = {"images": "image", "max_prompt_tokens": 64, "shuffle": False, **data}
        config = minimal_config(
            model={"path": str(self._model)}, run={"root": str(self.folder)}, data={**values, "train": train}
        )
        stream = load_streams(config, load_tokenizer(config)).train
        return [stream.prompt(ordinal) for ordinal in range(len(stream))]  # type: ignore[union-attr]


@pytest.fixture
def load(model: Path, tmp_path: Path) -> Loader:
    return Loader(model, tmp_path)


def test_a_prompt_has_a_placeholder_for_each_image_and_the_bytes_of_its_files(load: Loader, model: Path) -> None:
    uri = "data:image/png;base64," + base64.b64encode(RED).decode()
    rows = [
        {"question": "Which?", "answer": "1", "image": "red.png"},
        {"question": "Which?", "answer": "1", "image": ["blue.jpg", f"file://{load.folder / 'red.png'}"]},
        {"question": "Of <image> and <image>?", "answer": "1", "image": [uri, {"path": "blue.jpg", "bytes": None}]},
        {"question": "Which?", "answer": "1", "image": None},
    ]
    prompts = load(*rows)
    assert [prompt.images for prompt in prompts] == [(RED,), (BLUE, RED), (RED, BLUE), ()]
    assert [prompt.text for prompt in prompts] == [
        "<image>Which?", "<image><image>Which?", "Of <image> and <image>?", "Which?",
    ]  # fmt: skip
    processor = AutoProcessor.from_pretrained(model)
    for prompt in prompts:
        assert list(prompt.token_ids) == processor.tokenizer(prompt.text)["input_ids"]
    assert len(prompts[0].fields["image"][0]) == 64, "a digest stands for an image"


def test_the_length_of_a_prompt_counts_what_the_processor_makes_of_its_images(load: Loader, model: Path) -> None:
    row = {"question": "Which?", "answer": "1", "image": ["red.png", "blue.jpg"]}
    [prompt] = load(row)
    processor = AutoProcessor.from_pretrained(model)
    images = [[open_image(image) for image in prompt.images]]
    length = len(processor(images=images, text=[prompt.text])["input_ids"][0])
    assert length > len(prompt.token_ids) + 2
    assert load(row, max_prompt_tokens=length)
    with pytest.raises(ConfigError, match=rf"Item 0 of .* has {length} tokens, more than data.max_prompt_tokens"):
        load(row, max_prompt_tokens=length - 1)


def test_rows_of_mathv60k_as_openrlhf_m_has_them(load: Loader) -> None:
    """The column `message` is JSON in a text; an image is a part of it, by the path of its file."""
    (load.folder / "geo170k").mkdir()
    (load.folder / "geo170k" / "1.png").write_bytes(RED)
    question = (
        "Hint: Please answer the question and provide the correct option letter. Question: Which?\nChoices:\n(A) 1"
    )
    parts = [{"type": "image", "image": f"file://{load.folder}/geo170k/1.png"}, {"type": "text", "text": question}]
    row = {"id": "1", "message": json.dumps([{"role": "user", "content": parts}]), "answer": "$$A$$"}
    [prompt] = load(row, images="message", messages_field="message", max_prompt_tokens=128)
    assert (prompt.images, prompt.text) == ((RED,), f"<image>{question}")
    assert prompt.fields == row, "a reward server of OpenRLHF-M finds the row by the text of its message"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(load: Loader, mode: str) -> None:
    """As for Qwen's own tools: diagrams are often black lines on a transparent ground."""
    diagram = Image.new("RGBA", (60, 60), (0, 0, 0, 0))
    diagram.putpixel((3, 4), (0, 0, 0, 255))
    file = io.BytesIO()
    if mode == "P":
        diagram.quantize(2).save(file, "PNG")
    else:
        diagram.convert(mode).save(file, "PNG")
    (load.folder / "diagram.png").write_bytes(file.getvalue())
    row = {"question": "Which?", "answer": "1", "image": "diagram.png"}
    for max_pixels in (None, 50 * 50):
        [prompt] = load(row, max_pixels=max_pixels)
        opened = open_image(prompt.images[0])
        assert opened.getpixel((40, 40)) == (255, 255, 255)
        assert opened.convert("L").getextrema()[0] < (1 if max_pixels is None else 200)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_images_of_16_bits_keep_their_greys_and_those_without_a_white_are_refused(load: Loader, kind: str) -> None:
    row = {"question": "Which?", "answer": "1", "image": "grey"}
    Image.fromarray(np.full((64, 64), 128 * 257, np.uint16)).save(load.folder / "grey", kind)
    [prompt] = load(row)
    assert open_image(prompt.images[0]).getpixel((5, 5)) == (128, 128, 128)
    Image.fromarray(np.full((64, 64), 0.5, np.float32)).save(load.folder / "half", "TIFF")
    with pytest.raises(ConfigError, match=r"Item 0 .*an image of mode F has no fixed range"):
        load({**row, "image": "half"})


def test_damaged_exif_is_told_with_the_row(load: Loader) -> None:
    Image.new("RGB", (64, 32)).save(load.folder / "exif.png", exif=b"Exif\0\0garbagegarbage")
    with pytest.raises(ConfigError, match=r"Item 0 .* is damaged"):
        load({"question": "Which?", "answer": "1", "image": "exif.png"})


@pytest.mark.parametrize(
    "part",
    [
        {"image": "red.png"},
        {"type": "image_url", "image": None, "image_url": {"url": "red.png"}},
        {"type": "input_image", "image_url": "red.png"},
        {"type": "image", "path": "red.png", "text": None},
    ],
    ids=lambda part: ",".join(part),
)
@pytest.mark.parametrize("kind", ["text", "input_text", None])
def test_parts_in_the_spellings_of_others(load: Loader, part: dict[str, Any], kind: str | None) -> None:
    row = {"message": [{"role": "user", "content": [part, {"type": kind, "text": "Which?"}]}], "answer": "1"}
    [prompt] = load(row, images="message", messages_field="message")
    assert (prompt.images, prompt.text) == ((RED,), "<image>Which?")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "video", "video": "a.mp4"}], "must be a text or an image, not {'type': 'video'"),
        (["a"], "must be a text or an image, not 'a'"),
        ({"type": "text", "text": "x"}, "content must be text or a list of parts"),
        (7, "content must be text or a list of parts"),
        ([{"type": "image", "image": "red.png"}, {"type": "text", "text": "<image>?"}], "places for 2 images"),
    ],
)
def test_content_that_is_no_text_and_no_image_is_refused(load: Loader, content: Any, says: str) -> None:
    row = {"message": [{"role": "user", "content": content}], "answer": "1"}
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(row, images="message", messages_field="message")


def test_a_prompt_with_more_image_tokens_than_images_is_refused(tmp_path: Path) -> None:
    load = Loader(write_vision_model(tmp_path / "model"), tmp_path)
    with (tmp_path / "model" / "chat_template.jinja").open("a") as template:
        template.write("<image>")
    with pytest.raises(ConfigError, match=r"Item 0 .*prompt has 2 image tokens, and there are 1 images"):
        load({"question": "Which?", "answer": "1", "image": "red.png"}, template="chat")


def test_data_uris_without_a_type_are_read_and_others_refused_in_short(load: Loader) -> None:
    encoded = base64.b64encode(RED).decode()
    row = {"question": "Which?", "answer": "1", "image": f"data:image;base64,{encoded}"}
    assert load(row)[0].images == (RED,)
    with pytest.raises(ConfigError, match="a data URI begins with") as raised:
        load({**row, "image": f"data:application/png;base64,{encoded * 50}"})
    assert len(str(raised.value)) < 500
    with pytest.raises(ConfigError, match="In front of base64 write data:image/png;base64") as raised:
        load({**row, "image": encoded * 50})
    assert len(str(raised.value)) < 500


def test_images_of_the_library_datasets(load: Loader) -> None:
    import datasets

    columns = {"question": ["Which?"] * 2, "answer": ["1", "2"], "image": [open_image(RED), open_image(BLUE)]}
    features = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    )
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(load.folder / "saved"))
    prompts = load.load({"path": str(load.folder / "saved")})
    assert [image_size(prompt.images[0]) for prompt in prompts] == [(56, 56), (56, 84)]
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(load.folder / "rows.parquet"))
    assert len(load.load({"path": str(load.folder / "rows.parquet")})) == 2


def test_one_question_about_two_images_is_two_prompts(load: Loader) -> None:
    rows = [{"question": "Which?", "answer": "1", "image": name} for name in ("red.png", "blue.jpg", "red.png")]
    assert len(load(*rows, deduplicate=True)) == 2


def test_larger_images_are_scaled_down_to_max_pixels(load: Loader) -> None:
    row = {"question": "Which?", "answer": "1", "image": ["red.png", "blue.jpg"]}
    [prompt] = load(row, max_pixels=56 * 56)
    assert prompt.images[0] == RED
    height, width = image_size(prompt.images[1])
    assert height * width <= 56 * 56
    assert width / height == pytest.approx(1.5, rel=0.05)


def test_an_image_is_turned_as_its_file_says() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (84, 56)).save(file, "JPEG", exif=exif)
    assert image_size(file.getvalue()) == (84, 56)
    assert open_image(file.getvalue()).size == (56, 84)


def huge() -> bytes:
    """The header of a PNG of 60,000 by 60,000 pixels."""
    header = RED[12:16] + (60_000).to_bytes(4, "big") * 2 + RED[24:29]
    return RED[:12] + header + zlib.crc32(header).to_bytes(4, "big") + RED[33:]


def as_uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("https://example.org/cat.png", "is a URL"),
        ("absent.png", "absent.png cannot be read"),
        (as_uri(RED[:60]), "is damaged"),
        (as_uri(BLUE[:400]), "is damaged"),
        (as_uri(b"no image at all"), "is no image that PIL can read"),
        (as_uri(huge()), "is larger than 67,108,864 pixels"),
        ("data:image/png;base64,?", "no valid base64"),
        (7, "7 is no image"),
        (["red.png"] * (MAX_IMAGES + 1), f"{MAX_IMAGES + 1} images, more than {MAX_IMAGES}"),
    ],
)
def test_a_row_whose_image_cannot_be_used_is_named_before_anything_starts(load: Loader, image: Any, says: str) -> None:
    good = {"question": "Which?", "answer": "1", "image": "red.png"}
    with pytest.raises(ConfigError, match=rf"Item 1 of .*'image' \(data.images\).*({says})"):
        load(good, {**good, "image": image})


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "assistant", "content": None}, {"role": "user", "content": "?"}], ""),
        ([{"role": "user"}], "a message must have role and content"),
        (["?"], "a message must have role and content"),
        (7, "must be a list of messages"),
    ],
)
def test_messages_that_hold_images_are_checked_as_others_are(load: Loader, messages: Any, says: str) -> None:
    row = {"message": messages, "answer": "1"}
    if not says:
        assert load(row, images="message", messages_field="message")[0].images == ()
        return
    with pytest.raises(ConfigError, match=rf"Item 0 of .*'message'.*{says}"):
        load(row, images="message", messages_field="message")


def test_marks_must_be_as_many_as_images(load: Loader) -> None:
    with pytest.raises(
        ConfigError, match=r"Item 0 .* places for 2 images \(<image>, or image parts\), and there are 1"
    ):
        load({"question": "<image><image>?", "answer": "1", "image": "red.png"})


def test_a_column_that_is_missing_is_named_with_those_that_are_there(load: Loader) -> None:
    with pytest.raises(ConfigError, match=r"no field 'picture' \(data.images\)\. Fields: question, answer"):
        load({"question": "?", "answer": "1"}, images="picture")


def test_a_model_without_a_processor_of_images_is_refused(tmp_path: Path, make_tokenizer: Any) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match=r"has no processor of images"):
        load_tokenizer(minimal_config(model={"path": str(tmp_path)}, data={"images": "image"}))


def test_a_reward_server_of_openrlhf_needs_the_rows_own_prompt() -> None:
    least = {"run": {"name": "r"}, "model": {"path": "m"}, "train": {"total_steps": 1}}
    data = {"train": {"path": "d"}, "images": "image", "template": "chat"}
    args = {"url": "http://head:5000", "protocol": "openrlhf"}
    for own in ({}, {"prompt_field": "message"}):
        values = {**least, "data": data, "rewards": [{"name": "remote", "args": {**args, **own}}]}
        if own:
            assert load_values(values, [], "test").all_rewards[0].args["prompt_field"] == "message"
            continue
        with pytest.raises(ConfigError, match=r"prompt_field must be set .* column of the server's --input_key"):
            load_values(values, [], "test")
