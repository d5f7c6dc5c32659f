"""The tokenizer of a model folder, the model's context length, and the tokens that end a completion."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import names_function
from hpc_grpo.system.hugging_face import find_model, refuse_missing_folder
from hpc_grpo.weights.contract import refuse_short_context

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def installed_packages() -> dict[str, list[str]]:
    """Return the distributions of each top-level package, like `importlib.metadata.packages_distributions`.

    transformers asks for them at import. Python's function parses the description of every distribution, for 0.6 s;
    this one reads the names alone.
    """
    found = defaultdict(list)
    for each in importlib.metadata.distributions():
        packages = set((each.read_text("top_level.txt") or "").split())
        if not packages:
            files = [line.partition(",")[0] for line in (each.read_text("RECORD") or "").splitlines()]
            packages = {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}
        described = each.read_text("METADATA") or each.read_text("PKG-INFO") or ""
        if name := re.search(r"^Name: *(.+)$", described, re.MULTILINE):
            for package in packages:
                found[package].append(name[1])
    return dict(found)


def hasten_transformers() -> None:
    """Make a later import of transformers in this process faster."""
    if sys.version_info < (3, 12):  # later versions of the function count files of other kinds too
        importlib.metadata.packages_distributions = installed_packages


def import_without_torch(config: Config) -> None:
    """Import transformers without torch, which tokenizers do not use. This saves about 2 s of a start.

    transformers then offers no models in this process. Does nothing if the config names functions of the user's: they
    may need models.
    """
    hasten_transformers()
    named = [config.task.name, *(config.loss.functions | config.eval.functions | config.train.functions).values()]
    named += [source.path for _, source in config.data.sources()]
    needs_torch = config.data.images is not None  # for the processor
    if needs_torch or "torch" in sys.modules or any(map(names_function, named)):
        return
    quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}.items() - os.environ.items()  # no warning that torch is missing
    os.environ.update(quiet)
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of torch fails
    try:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # noqa: F401
    finally:
        del sys.modules["torch"]
        for name, _ in quiet:
            del os.environ[name]


def load_tokenizer(config: Config) -> Any:
    """Load the model's tokenizer. Raises ConfigError when there is none to load."""
    if config.data.images is None:
        return _load_tokenizer("model.path", config.model.path)
    processor = load_processor(config)
    tokenizer = processor.tokenizer
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return tokenizer


def load_processor(config: Config) -> Any:
    """Load the model's processor of images and text. Raises ConfigError when there is none."""
    from transformers import AutoProcessor

    refuse_missing_processor(config, find_model(config.model.path))
    return _load(AutoProcessor, "processor", "model.path", config.model.path)


def refuse_missing_processor(config: Config, folder: Path) -> None:
    """Raise ConfigError if a run has images, and its model's folder has no processor of images."""
    if config.data.images is not None and not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        raise ConfigError(
            f"data.images = {config.data.images}: model.path = {config.model.path} has no processor of images: "
            f"{folder} has neither {' nor '.join(_PROCESSOR_FILES)}. Copy this file from the original model into the "
            f"folder."
        )


def refuse_missing_tokenizer(key: str, path: str) -> None:
    """Raise ConfigError for a folder without a tokenizer: transformers would make one with an empty vocabulary."""
    if Path(path).is_dir() and not any(any(Path(path).glob(name)) for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{key} = {path!r}: the folder has no tokenizer (tokenizer.json or another of its files). Copy the files "
            f"of the original model's tokenizer into the folder."
        )


def _load_tokenizer(key: str, path: str) -> Any:
    from transformers import AutoTokenizer

    refuse_missing_tokenizer(key, path)
    return _load(AutoTokenizer, "tokenizer", key, path)


def _load(kind: Any, what: str, key: str, path: str) -> Any:
    refuse_missing_folder(path, key)
    try:
        return kind.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types for damaged files
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        raise ConfigError(
            f"{key} = {path!r}: no {what} can be loaded from it ({reason}). Give the complete folder of a Hugging Face "
            "model, or fetch a named one first, on a login node: hpc-grpo cluster prefetch CONFIG."
        ) from error


def context_length(config: Config) -> int | None:
    """Return the model's longest sequence in tokens; None if its config has no limit."""
    from transformers import AutoConfig

    loaded = _load(AutoConfig, "config.json", "model.path", config.model.path)
    limit: int | None = getattr(loaded.get_text_config(), "max_position_embeddings", None)
    return limit


def check_context_length(config: Config) -> None:
    """Raise ConfigError if prompt and completion together may exceed the model's context length."""
    refuse_short_context(context_length(config), config, f"model.path = {config.model.path}")


def decoder_of(tokenizer: Any) -> Callable[..., str]:
    """Return `decode(token_ids, skip_special_tokens=…)`, which keeps all spaces.

    It is the method of the tokenizer's part in Rust, if nothing else decodes. Then a process that unpickles it does not
    import transformers, which takes seconds.
    """
    from transformers import PreTrainedTokenizerFast

    kinds = type(tokenizer), PreTrainedTokenizerFast
    if all(len({getattr(kind, name, None) for kind in kinds}) == 1 for name in ("decode", "_decode")):
        decode: Callable[..., str] = tokenizer.backend_tokenizer.decode
        return decode
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def stop_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens. Raises ConfigError if the model has none: no completion could end."""
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(config.model.path).eos_token_id
    except (OSError, TypeError) as error:
        declared = None  # optional in the format: a model folder may come without generation_config.json
        if (file := find_model(config.model.path) / "generation_config.json").is_file():
            raise ConfigError(f"{file} is damaged. Copy the original model's file ({error}).") from error
    ids = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    found = tuple(sorted(token_id for token_id in ids if token_id is not None))
    if not found:
        raise ConfigError(
            f"model.path = {config.model.path!r}: neither its tokenizer nor its generation_config.json names an "
            f"end token. Set eos_token in tokenizer_config.json."
        )
    return found


def refuse_other_vocabularies(config: Config) -> None:
    """Raise ConfigError if the tokenizer of a reference or teacher has another vocabulary than the model's."""
    for key, path in config.scoring_models.items():
        others = _load_tokenizer(key, path).get_vocab()
        compare_vocabularies(config, key, load_tokenizer(config).get_vocab(), others)


def compare_vocabularies(config: Config, key: str, own: Mapping[str, int], others: Mapping[str, int]) -> None:
    """Raise ConfigError if two vocabularies (token to id) differ: the model of `key` scores the policy's token ids."""
    differing = sorted(token for token in own.keys() | others.keys() if own.get(token) != others.get(token))
    if differing:
        pairs = ((token, others.get(token, "none"), own.get(token, "none")) for token in differing[:3])
        shown = ", ".join(f"{token!r} ({theirs}, not {ours})" for token, theirs, ours in pairs)
        raise ConfigError(
            f"{key} = {config.models[key]}: {len(differing)} tokens have other ids than in model.path = "
            f"{config.model.path}, such as {shown}. This model must score the policy's token ids: take a model of the "
            f"same family, with the same tokenizer."
        )


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return token to id from the folder's tokenizer.json, read as JSON; None if it cannot be read."""
    try:
        written = json.loads((folder / "tokenizer.json").read_text())
        model = written["model"]["vocab"]
        tokens = model if isinstance(model, dict) else {token: index for index, (token, _) in enumerate(model)}
        return {**tokens, **{each["content"]: each["id"] for each in written.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError):
        return None
