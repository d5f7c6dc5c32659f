"""The images of prompts: read from the data, checked once at load, and opened by engines, learners and rewards.

An image travels as the bytes of its file. Every process opens it by `open_image`, so all see the same pixels.
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from hpc_grpo.types import GroupRequest

MARK = "<image>"
"""Where an image stands in a prompt of text. Without marks all images stand before the text."""

MAX_IMAGES = 16
"""Most images of one prompt."""

MAX_IMAGE_PIXELS = 1 << 26
"""Most pixels of an image file: more would take a quarter of a GiB in each process that opens the image."""

_THUMBNAIL_SIDE = 160
_IMAGE_TYPES, _IMAGE_KEYS = ("image", "image_url", "input_image"), ("image", "image_url", "path", "url")
_TEXT_TYPES = ("text", "input_text", None)
_LONGEST_PATH = 4096
_DATA_URI = re.compile(r"data:image(/[\w.+-]+)?;base64,")
_SHOWN = 100


class ImageError(ValueError):
    """A value of the data that is no usable image."""


def images_of(value: Any, folder: Path, max_pixels: int | None = None) -> tuple[bytes, ...]:
    """Read one image or a list of images; null is no image. Raises ImageError.

    An image is a path (relative to `folder`, or file://), a data URI, bytes, an image of PIL, or an image of the
    library `datasets`: a mapping with `bytes` or `path`.
    """
    values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    images = tuple(_checked(_file(each, folder), max_pixels) for each in values if each is not None)
    if len(images) > MAX_IMAGES:
        raise ImageError(f"it has {len(images)} images, more than {MAX_IMAGES}. Leave the item out.")
    return images


def open_image(content: bytes) -> Image:
    """Open an image as RGB, rotated by the file's EXIF orientation. Transparent pixels become white."""
    return _as_rgb(_turned(content))


def thumbnail(content: bytes) -> str:
    """Return a small copy of an image, a JPEG in base64. Logged rollouts have this copy, for reports."""
    image, file = open_image(content), io.BytesIO()
    image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    image.save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def image_size(content: bytes) -> tuple[int, int]:
    """Return the height and width, in pixels, of the image that `open_image` returns."""
    width, height = _turned(content).size
    return height, width


def _as_rgb(image: Image) -> Image:
    import numpy as np
    from PIL import Image

    _refuse_unbounded(image)
    if image.mode.startswith("I;16"):  # PIL would cut off values above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _refuse_unbounded(image: Image) -> None:
    if image.mode in ("I", "F"):
        raise ImageError(
            f"an image of mode {image.mode} has no fixed range of values: save it with 8 or 16 bits a channel."
        )


def _turned(content: bytes) -> Image:
    from PIL import Image, ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(content)))


def with_image_parts(messages: Sequence[Mapping[str, Any]], num_images: int) -> list[Mapping[str, Any]]:
    """Return messages with content in parts, `{"type": "image"}` for each mark. Content in parts keeps its parts.

    Without any mark or part, the images stand at the front of the last message of the user. Raises ImageError if the
    number of marks and image parts is not `num_images`, or for a part of another kind.
    """
    made: list[Mapping[str, Any]] = []
    for message in messages:
        parts = [{"type": "image"} if is_image(part) else part for part in _parts(message["content"])]
        made.append({**message, "content": parts})
    num_places = sum(is_image(part) for message in made for part in message["content"])
    if not num_places and num_images:
        last = max((at for at, message in enumerate(made) if message["role"] == "user"), default=-1)
        made[last] = {**made[last], "content": [{"type": "image"}] * num_images + made[last]["content"]}
    elif num_places != num_images:
        raise ImageError(
            f"its prompt has places for {num_places} images ({MARK}, or image parts), and there are {num_images}."
        )
    return made


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the images inside messages, in the formats of OpenAI, Qwen and OpenRLHF-M. Raises ImageError."""
    found = []
    for part in filter(is_image, chain.from_iterable(_parts(message["content"]) for message in messages)):
        held = next((part[key] for key in _IMAGE_KEYS if key in part), None)
        found.append(held.get("url") if isinstance(held, Mapping) and "url" in held else held)
    return found


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image. Qwen's tools leave out the type."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in _IMAGE_TYPES or (kind is None and any(part.get(key) for key in _IMAGE_KEYS[:2]))


def _parts(content: Any) -> list[Mapping[str, Any]]:
    """Return a message's content as parts, texts split at marks. Raises ImageError for parts of other kinds."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence | None):
        raise ImageError(f"a message's content must be text or a list of parts, not {content!r:.{_SHOWN}}.")
    parts: list[Mapping[str, Any]] = []
    for part in content or ():
        if is_image(part):
            parts.append({name: own for name, own in part.items() if own is not None})  # tables give parts all keys
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str):
            pieces = filter(None, re.split(f"({MARK})", part["text"]))
            parts += [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces]
        else:
            raise ImageError(f"a part of a message must be a text or an image, not {part!r:.{_SHOWN}}.")
    return parts


def _file(value: Any, folder: Path) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if hasattr(value, "save") and hasattr(value, "mode"):  # an image of PIL
        return _as_png(value)
    if not isinstance(value, str):
        raise ImageError(f"{value!r:.{_SHOWN}} is no image: give a path, bytes, a data URI or an image of PIL.")
    if uri := _DATA_URI.match(value):
        try:
            return base64.b64decode(value[uri.end() :], validate=True)
        except ValueError as error:
            raise ImageError(f"{value:.{_SHOWN}} is no valid base64 ({error}).") from error
    if value.startswith("data:"):
        raise ImageError(f"{value:.{_SHOWN}} is no image: a data URI begins with data:image/png;base64, or the like.")
    if re.match(r"(https?|s3|gs|hf)://", value):
        raise ImageError(
            f"{value:.{_SHOWN}} is a URL, which compute nodes do not fetch. Download it and give its path."
        )
    if len(value) > _LONGEST_PATH:
        raise ImageError(f"{value:.{_SHOWN}}… is no path. In front of base64 write data:image/png;base64, or the like.")
    path = folder / value.removeprefix("file://")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"image {path} cannot be read ({error.strerror}).") from error


def _checked(content: bytes, max_pixels: int | None) -> bytes:
    """Decode an image completely. Return its file, or a smaller copy if it has more than `max_pixels`."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as opened:
            width, height = opened.size
            if width * height > MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{width} x {height} pixels")
            _refuse_unbounded(ImageOps.exif_transpose(opened))
    except (ImageError, MemoryError):
        raise
    except Image.DecompressionBombError as error:  # PIL raises it too, above a higher limit
        raise ImageError(f"an image is larger than {MAX_IMAGE_PIXELS:,} pixels ({error}). Scale it down.") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{content[:16]!r}… of {len(content):,} bytes is no image that PIL can read.") from error
    except Exception as error:  # PIL raises many kinds for damaged files and EXIF
        raise ImageError(f"an image of {len(content):,} bytes is damaged ({error}).") from error
    if max_pixels is None or width * height <= max_pixels:
        return content
    image = open_image(content)
    scale = (max_pixels / (width * height)) ** 0.5
    width, height = (max(1, int(side * scale)) for side in image.size)
    return _as_png(image.resize((width, height), Image.Resampling.BICUBIC))


def _as_png(image: Any) -> bytes:
    file = io.BytesIO()
    _as_rgb(image).save(file, "PNG")
    return file.getvalue()


async def with_opened_images(request: GroupRequest) -> GroupRequest:
    """Replace the reference to a request's image files by opened images."""
    files = await request.images
    return replace(request, images=await asyncio.to_thread(lambda: tuple(map(open_image, files))))
