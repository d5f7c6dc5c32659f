"""From a config to streams: sources are read and tokenized once, split, filtered and mixed. Every start comes by here.

Raises ConfigError for the first item that cannot be used, before anything else has started.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from hpc_grpo.config import Config, HeldOutConfig, SourceConfig
from hpc_grpo.data.cache import RowCache, Rows
from hpc_grpo.data.curriculum import difficulty_ranks
from hpc_grpo.data.encoder import Encoder, Row
from hpc_grpo.data.filters import LengthRule, fitting, held_out, lowest, without_duplicates
from hpc_grpo.data.fingerprint import tokenizer_identity
from hpc_grpo.data.sources import open_source, read_items
from hpc_grpo.data.stream import DemonstrationStream, Part, PromptStream
from hpc_grpo.data.templates import Tokenizer
from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Streams:
    """Holds the run's stream and its eval sets by name; `digests` are those of the items, by config key.

    The set of `data.eval`, or that of `data.held_out`, has the name "".
    """

    train: PromptStream | DemonstrationStream
    evals: Mapping[str, PromptStream]
    digests: Mapping[str, str]


def load_streams(
    config: Config,
    tokenizer: Tokenizer,
    *,
    context: int | None = None,
    tokenizer_id: Mapping[str, str] | None = None,
) -> Streams:
    """Load all that the run reads. `tokenizer_id` stands for the tokenizer's files where it has none.

    `context` is that of the model, in tokens. Prompts are checked against it by `check_context_length`.
    """
    loader = _Loader(config, tokenizer, tokenizer_id)
    train = loader.load(config.data.sources(for_eval=False))
    sets = loader.load_eval_sets() if config.reads_eval_data else {}
    split = _Split(config, train, [each for loaded in sets.values() for each in loaded], context)
    has_eval = config.needs.rollouts and config.eval.every is not None
    if not config.needs.rollouts:
        demonstrations = DemonstrationStream(split.train(), config.run.seed, shuffle=config.data.shuffle)
        return Streams(demonstrations, {}, loader.digests)
    prompts = PromptStream(split.train(), config.run.seed, shuffle=config.data.shuffle)
    return Streams(prompts, split.evals(sets) if has_eval else {}, loader.digests)


def load_evals(
    config: Config, tokenizer: Tokenizer, *, tokenizer_id: Mapping[str, str] | None = None
) -> Mapping[str, PromptStream]:
    """Load the eval sets alone: of data.train no more than what is held out of it."""
    loader = _Loader(config, tokenizer, tokenizer_id)
    train = [] if config.data.held_out is None else loader.load(config.data.sources(for_eval=False))
    return _Split(config, train).evals(loader.load_eval_sets())


def load_rows(
    config: Config, source: SourceConfig, encoder: Encoder, cache: RowCache, tokenizer_id: Mapping[str, str]
) -> Rows:
    """Return the rows of a source, from the cache or made anew. Raises ConfigError for an item that cannot be used."""
    origin = open_source(source)

    def items_id() -> Mapping[str, str]:
        return origin.identity() or {"digest": encoder.digest(read_items(source))}

    before = items_id()
    identity = {"items": dict(before), "tokenizer": dict(tokenizer_id), **encoder.identity()}
    if (found := cache.find(identity)) is not None:
        return found

    def unchanged() -> Iterator[Row]:
        yield from encoder.rows(read_items(source))
        if items_id() != before:
            raise ConfigError(f"Data set {source.path} changed while it was read. Start again when it stays as it is.")

    start = time.monotonic()
    rows = cache.write(identity, unchanged())
    print(f"Tokenized {len(rows):,} items of {source.path} in {time.monotonic() - start:.1f} s, once.", file=sys.stderr)
    return rows


def source_names(sources: Sequence[SourceConfig]) -> list[str]:
    """Give each source a distinct name: its own, else what its path ends with, with #2, #3 … where it is used again.

    >>> paths = ["a/math.jsonl", "openai/gsm8k", "reasoning_gym:gcd", "b/math.json"]
    >>> source_names([SourceConfig(path=path) for path in paths])
    ['math', 'gsm8k', 'gcd', 'math#2']
    """
    names: list[str] = []
    for source in sources:
        path = PurePath(source.path.rpartition(":")[2])
        name = source.name or path.stem
        earlier = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{earlier + 1}" if earlier else name)
    return names


@dataclass(frozen=True)
class _Loaded:
    name: str
    source: SourceConfig
    rows: Rows


class _Loader:
    """Loads sources from the cache, or into it, and keeps the digests of their items by config key."""

    def __init__(self, config: Config, tokenizer: Tokenizer, tokenizer_id: Mapping[str, str] | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._cache = RowCache(config.cache_path)
        self._identity = tokenizer_identity(config, os.environ) if tokenizer_id is None else tokenizer_id
        self.digests: dict[str, str] = {}

    def load(self, sources: Sequence[tuple[str, SourceConfig]]) -> list[_Loaded]:
        """Load the sources of one set, each behind its key in the config."""
        return [
            self._loaded(name, key, source)
            for name, (key, source) in zip(source_names([source for _, source in sources]), sources, strict=True)
        ]

    def load_eval_sets(self) -> dict[str, list[_Loaded]]:
        return {name: self.load(self._config.data.eval_sources(name)) for name in self._config.data.eval_data}

    def _loaded(self, name: str, key: str, source: SourceConfig) -> _Loaded:
        encoder = Encoder(self._config, source, self._tokenizer)
        rows = load_rows(self._config, source, encoder, self._cache, self._identity)
        self.digests[key] = rows.digest
        return _Loaded(name, source, rows)


class _Split:
    """Decides which rows are trained on and which are evaluated, and says how many went where."""

    def __init__(
        self,
        config: Config,
        train: Sequence[_Loaded],
        evaluated: Sequence[_Loaded] = (),
        context: int | None = None,
    ) -> None:
        self._config = config
        self._train = train
        self._evaluated = evaluated
        self._context = context

    def train(self) -> list[Part]:
        data = self._config.data
        seen = np.concatenate([np.empty(0, np.uint64), *(each.rows.prompt_hashes for each in self._evaluated)])
        parts = []
        for each in self._train:
            hashes = each.rows.prompt_hashes
            ours = np.flatnonzero(~self._held_out(each))
            unique = ours
            if data.deduplicate:
                unique, seen = without_duplicates(ours, hashes, seen)
            kept = self._fitting(each, unique)
            _tell(
                each,
                {
                    "held out": len(hashes) - len(ours),
                    "duplicate": len(ours) - len(unique),
                    "too long": len(unique) - len(kept),
                },
                len(kept),
            )
            part = self._part(each, kept)
            field = data.curriculum and data.curriculum.difficulty_field
            parts.append(replace(part, difficulty=difficulty_ranks(part, field)) if field else part)
        self._tell_of_trained_evals(parts)
        return parts

    def _tell_of_trained_evals(self, parts: Sequence[Part]) -> None:
        trained = np.concatenate([part.rows.prompt_hashes[part.numbers] for part in parts])
        for each in self._evaluated:
            if num := int(np.isin(each.rows.prompt_hashes, trained).sum()):
                print(
                    f"warning: {each.source.path}: {num:,} of {len(each.rows):,} eval prompts are trained on too. Set "
                    f"data.deduplicate=true to leave them out of training.",
                    file=sys.stderr,
                )

    def evals(self, sets: Mapping[str, Sequence[_Loaded]]) -> dict[str, PromptStream]:
        """Return a stream for each set of data that is there for eval, and for what is held out of training, as ""."""
        every = {
            name: [(each, np.arange(len(each.rows), dtype=np.int64)) for each in loaded]
            for name, loaded in sets.items()
        }
        if self._config.data.held_out is not None:
            every = {"": self._kept_for_eval(self._config.data.held_out), **every}
        return {name: self._eval_stream(rows) for name, rows in every.items()}

    def _kept_for_eval(self, held: HeldOutConfig) -> list[tuple[_Loaded, NDArray[np.int64]]]:
        every = [(each, np.flatnonzero(self._held_out(each))) for each in self._train]
        if not any(len(kept) for _, kept in every):
            raise ConfigError(
                f"data.held_out.fraction = {held.fraction:g} holds nothing out of data.train: raise it, or set "
                f"eval.every to null."
            )
        return [
            (each, lowest(kept, each.rows.prompt_hashes, held.max_items or len(kept)))
            for each, kept in every
            if len(kept)
        ]

    def _eval_stream(self, rows: Sequence[tuple[_Loaded, NDArray[np.int64]]]) -> PromptStream:
        parts = [self._part(each, self._fitting(each, numbers)) for each, numbers in rows]
        return PromptStream(parts, self._config.run.seed, shuffle=False, for_eval=True)

    def _held_out(self, each: _Loaded) -> NDArray[np.bool_]:
        held = self._config.data.held_out
        return held_out(each.rows.prompt_hashes, 0.0 if held is None else held.fraction)

    def _fitting(self, each: _Loaded, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the candidates that are no longer than prompts, and sequences to imitate, may be."""
        config, path = self._config, each.source.path
        drop = config.data.drop_long_prompts
        key, most = "data.max_prompt_tokens", config.data.max_prompt_tokens
        kept = fitting(candidates, each.rows.num_prompt_tokens, LengthRule(key, most, path, f"Raise {key}"), drop)
        if config.needs.labels:
            key, most = "train.max_tokens_per_microbatch", config.train.max_tokens_per_microbatch
            rules = [LengthRule(key, most, path, f"Raise {key}")]
            if self._context is not None:
                model = f"the context of model.path = {config.model.path}"
                rules.append(LengthRule(model, self._context, path, "Take another model"))
            for rule in rules:
                kept = fitting(kept, each.rows.num_tokens, rule, drop)
        return kept

    def _part(self, each: _Loaded, kept: NDArray[np.int64]) -> Part:
        if not len(kept):
            raise ConfigError(
                f"Nothing of {each.source.path} ({each.name}) is left: its items are held out, or their prompts came "
                f"before. Leave the source out, lower data.held_out.fraction, or set data.deduplicate=false."
            )
        sets, own = self._config.reward_sets, self._config.rewards_of(each.source)
        return Part(each.name, each.source, each.rows, kept, sets.index(own))


def _tell(each: _Loaded, dropped: Mapping[str, int], num_kept: int) -> None:
    reasons = [f"{count:,} {reason}" for reason, count in dropped.items() if count]
    if reasons:
        kept = f"{num_kept:,} of {len(each.rows):,} items are trained on"
        print(f"{each.source.path}: {kept} ({', '.join(reasons)}).", file=sys.stderr)
