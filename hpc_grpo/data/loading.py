"""Load streams from a config: read, tokenize, split, filter and mix the sources. Every start uses this module.

Raises ConfigError for the first item that cannot be used, before anything else starts. Filters run at every start and
are not cached: changing a filter tokenizes nothing again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.data.cache import Row, RowCache, Rows
from hpc_grpo.data.curriculum import difficulty_ranks
from hpc_grpo.data.encoder import Encoder, held_out_below, refuse_share
from hpc_grpo.data.fingerprint import tokenizer_identity
from hpc_grpo.data.sources import open_source, read_items
from hpc_grpo.data.stream import DemonstrationStream, Part, PromptStream
from hpc_grpo.data.templates import Tokenizer
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import tokenized_data


@dataclass(frozen=True)
class Streams:
    """The training stream, eval sets by name ("" is data.eval or data.held_out), and digests of items by config key."""

    train: PromptStream | DemonstrationStream
    evals: Mapping[str, PromptStream]
    digests: Mapping[str, str]


def load_streams(
    config: Config, tokenizer: Tokenizer, *, context: int | None = None, tokenizer_id: Mapping[str, str] | None = None
) -> Streams:
    """Load all data of the run. `tokenizer_id` replaces the hash of the tokenizer's files if there are none.

    `context` is the model's context length in tokens, the limit of demonstrations. `check_context_length` checks
    prompts.
    """
    loader = _Loader(config, tokenizer, tokenizer_id)
    sources = loader.load(config.data.sources(for_eval=False))
    sets = loader.load_eval_sets() if config.reads_eval_data else {}
    parts = _trained(config, sources, [part for parts in sets.values() for part in parts], context)
    seed, shuffle = config.run.seed, config.data.shuffle
    if not config.needs.rollouts:
        return Streams(DemonstrationStream(parts, seed, shuffle=shuffle), {}, loader.digests)
    evals = _evals(config, sources, sets) if config.eval.every is not None else {}
    return Streams(PromptStream(parts, seed, shuffle=shuffle), evals, loader.digests)


def load_evals(
    config: Config, tokenizer: Tokenizer, *, tokenizer_id: Mapping[str, str] | None = None
) -> Mapping[str, PromptStream]:
    """Load only the eval sets, and the held-out part of data.train."""
    loader = _Loader(config, tokenizer, tokenizer_id)
    sources = [] if config.data.held_out is None else loader.load(config.data.sources(for_eval=False))
    return _evals(config, sources, loader.load_eval_sets())


def load_rows(config: Config, source: SourceConfig, tokenizer: Tokenizer, tokenizer_id: Mapping[str, str]) -> Rows:
    """Return the rows of a source, from the cache or made now. Raises ConfigError for an item that cannot be used."""
    origin, encoder, cache = open_source(source), Encoder(config, source, tokenizer), RowCache(tokenized_data(config))

    def items_id() -> Mapping[str, str]:
        return origin.identity() or {"digest": encoder.digest(read_items(source))}

    before = items_id()
    identity = {"items": dict(before), "tokenizer": dict(tokenizer_id), **encoder.identity()}
    if (found := cache.find(identity)) is not None:
        return found

    def unchanged() -> Iterator[Row]:
        yield from encoder.rows(read_items(source))
        if items_id() != before:
            raise ConfigError(
                f"Data set {source.path} changed while it was read. Start again when no process changes it."
            )

    start = time.monotonic()
    rows = cache.write(identity, unchanged())
    print(f"Tokenized {len(rows):,} items of {source.path} in {time.monotonic() - start:.1f} s, once.", file=sys.stderr)
    return rows


def source_names(sources: Sequence[SourceConfig]) -> list[str]:
    """Give each source a distinct name: its configured name, or the end of its path, with #2, #3 … for repeated names.

    >>> paths = ["a/math.jsonl", "openai/gsm8k", "reasoning_gym:gcd", "b/math.json"]
    >>> source_names([SourceConfig(path=path) for path in paths])
    ['math', 'gsm8k', 'gcd', 'math#2']
    """
    names: list[str] = []
    for source in sources:
        name = source.name or PurePath(source.path.rpartition(":")[2]).stem
        earlier = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{earlier + 1}" if earlier else name)
    return names


class _Loader:
    """Loads sources through the cache, and keeps the digests of their items by config key."""

    def __init__(self, config: Config, tokenizer: Tokenizer, tokenizer_id: Mapping[str, str] | None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._identity = tokenizer_identity(config, os.environ) if tokenizer_id is None else tokenizer_id
        self.digests: dict[str, str] = {}

    def load(self, sources: Sequence[tuple[str, SourceConfig]]) -> list[Part]:
        """Load the sources of one set, given as pairs of config key and source."""
        config, parts = self._config, []
        for name, (key, source) in zip(source_names([source for _, source in sources]), sources, strict=True):
            rows = load_rows(config, source, self._tokenizer, self._identity)
            self.digests[key] = rows.digest
            reward_set = config.reward_sets.index(config.rewards_of(source))
            played = list(config.environments)
            environment = played.index(key) if key in played else None
            parts.append(Part(name, source, rows, np.arange(len(rows), dtype=np.int64), reward_set, environment))
        return parts

    def load_eval_sets(self) -> dict[str, list[Part]]:
        return {name: self.load(sources) for name, sources in self._config.data.eval_sources.items()}


def _trained(config: Config, sources: Sequence[Part], evaluated: Sequence[Part], context: int | None) -> list[Part]:
    """Return the training rows of each source. Prints how many items are left out, and why."""
    data, parts = config.data, []
    seen = np.concatenate([np.empty(0, np.uint64), *(part.rows.prompt_hashes for part in evaluated)])
    for part in sources:
        ours = unique = np.flatnonzero(~_held_out(config, part))
        if data.deduplicate:
            unique, seen = without_duplicates(ours, part.rows.prompt_hashes, seen)
        kept = _fitting(config, part, unique, context)
        counts = (len(part.rows), len(ours), len(unique), len(kept))
        left_out = zip(("held out", "duplicate", "too long"), counts, counts[1:], strict=False)
        if reasons := [f"{before - after:,} {reason}" for reason, before, after in left_out if before > after]:
            shown = f"{len(kept):,} of {len(part.rows):,} items are trained on ({', '.join(reasons)})"
            print(f"{part.source.path}: {shown}.", file=sys.stderr)
        if not len(kept):
            raise ConfigError(
                f"Nothing of {part.source.path} ({part.name}) is left: its items are held out, or their prompts are "
                f"duplicates. Leave the source out, lower data.held_out, or set data.deduplicate=false."
            )
        part = replace(part, numbers=kept)
        if data.curriculum and data.curriculum.difficulty_field:
            part = replace(part, difficulty=difficulty_ranks(part, data.curriculum.difficulty_field))
        parts.append(part)
    trained = np.concatenate([part.rows.prompt_hashes[part.numbers] for part in parts])
    for part in evaluated:
        if num := int(np.isin(part.rows.prompt_hashes, trained).sum()):
            print(
                f"warning: {part.source.path}: {num:,} of {len(part.rows):,} eval prompts are trained on too. Set "
                f"data.deduplicate=true to leave them out of training.",
                file=sys.stderr,
            )
    return parts


def _evals(config: Config, sources: Sequence[Part], sets: Mapping[str, Sequence[Part]]) -> dict[str, PromptStream]:
    """Return a stream for each eval set with its own data. "" is the held-out part of the training data."""
    every = dict(sets)
    if (held := config.data.held_out) is not None:
        refuse_share(held, chain.from_iterable(part.rows.prompt_hashes for part in sources))
        numbers = [np.flatnonzero(_held_out(config, part)) for part in sources]
        kept = [replace(part, numbers=own) for part, own in zip(sources, numbers, strict=True) if len(own)]
        every = {"": kept, **every}
    streams = {}
    for name, parts in every.items():
        fitting = [replace(part, numbers=_fitting(config, part, part.numbers)) for part in parts]
        streams[name] = PromptStream(fitting, config.run.seed, shuffle=False, for_eval=True)
    return streams


def _held_out(config: Config, part: Part) -> NDArray[np.bool_]:
    """Return which rows are held out for eval. This depends on the prompt alone, not on other rows or their order."""
    return part.rows.prompt_hashes < np.uint64(held_out_below(config.data.held_out or 0.0))


def without_duplicates(
    candidates: NDArray[np.int64], prompt_hashes: NDArray[np.uint64], seen: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the first candidate of each new prompt, and `seen` with these prompts."""
    unique, first = np.unique(prompt_hashes[candidates], return_index=True)
    new = first[~np.isin(unique, seen)]
    return candidates[np.sort(new)], np.union1d(seen, unique)


def _fitting(
    config: Config, part: Part, candidates: NDArray[np.int64], context: int | None = None
) -> NDArray[np.int64]:
    """Return the candidates that fit the length limits of prompts and of sequences to imitate.

    Raises ConfigError for a longer candidate unless the config drops long ones, and if none is left.
    """
    limits = [("data.max_prompt_tokens", config.data.max_prompt_tokens, part.rows.num_prompt_tokens)]
    if part.environment is not None and part.source.prompt_field is None and part.source.messages_field is None:
        limits = []  # the environment makes the prompt, and its length is checked when the episode begins
    if config.needs.labels:
        limits.append(("train.max_tokens_per_microbatch", config.train.max_tokens_per_microbatch, part.rows.num_tokens))
        if context is not None:
            limits.append((f"the context of model.path = {config.model.path}", context, part.rows.num_tokens))
    for key, most, num_tokens in limits:
        remedy = "Take another model" if key.startswith("the context") else f"Raise {key}"
        fits = num_tokens[candidates] <= most
        if not config.data.drop_long_prompts and not fits.all():
            number = int(candidates[np.flatnonzero(~fits)[0]])
            raise ConfigError(
                f"Item {number} of {part.source.path} (counted from 0) has {num_tokens[number]} tokens, more than "
                f"{key} = {most}. {remedy}, or set data.drop_long_prompts = true to train without such items."
            )
        if len(candidates) and not fits.any():
            raise ConfigError(
                f"All {len(candidates)} items of {part.source.path} are longer than {key} = {most}; "
                f"dropping them leaves nothing. {remedy}."
            )
        candidates = candidates[fits]
    return candidates
