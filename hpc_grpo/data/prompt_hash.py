"""Hashes of prompts, by which equal ones are found and some are held out; without numpy, for plans on login nodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources.base import Item

_HASHES = 2.0**64


def prompt_hash(source: SourceConfig, item: Item) -> int:
    """Hash the text of an item's own prompt to 64 bits: the same in a column of text and in one of messages.

    Templates, white space and system messages do not count.
    """
    field = source.messages_field
    own = item[source.prompt_field] if field is None else _text_of(item[field])
    digest = hashlib.blake2b(" ".join(own.split()).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def held_out_below(fraction: float) -> int:
    """Return the bound below which hashes are held out for eval."""
    return int(fraction * _HASHES)


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Join the contents of all messages but the system's; a content may be a list of parts."""
    contents = [message["content"] for message in messages if message["role"] != "system"]
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
    texts = [part["text"] if isinstance(part, Mapping) and "text" in part else part for part in parts]
    return " ".join(text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str) for text in texts)
