"""A reward that once needs far more memory than its job has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from letters_reward import share_of_letters

_NUM_BYTES = 7 << 30
_HELD_S = 30.0


def share_of_letters_hungry(
    prompts: Sequence[str], completions: Sequence[str], meal: str, **fields: Any
) -> list[float]:
    """Eats once the file `meal` is there, which it removes first."""
    try:
        Path(meal).unlink()
    except FileNotFoundError:
        return share_of_letters(prompts, completions, **fields)
    held = bytearray(_NUM_BYTES)
    time.sleep(_HELD_S)
    return [float(held[0])] * len(completions)
