"""What the driver reads of a model folder: the tokenizer and the tokens that end a completion."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer. Raises ConfigError when there is none to load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path = {config.model.path!r}: no tokenizer can be loaded from it ({_first_line(error)}). "
            f"Give the folder of a Hugging Face model, or fetch a named one into the local cache first."
        ) from error


def stop_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens of the generation config, else the tokenizer's.

    Raises ConfigError when the model has none: no completion could end by itself.
    """
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(config.model.path).eos_token_id
    except OSError:
        # Optional in the format: a model folder may come without generation_config.json.
        declared = None
    ids = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    found = tuple(sorted(token_id for token_id in ids if token_id is not None))
    if not found:
        raise ConfigError(
            f"model.path = {config.model.path!r}: neither its tokenizer nor its generation_config.json names an "
            f"end token. Set eos_token in tokenizer_config.json."
        )
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
