"""Records of the learners' training data: every sequence of a step, one file for each learner's share.

The files hold only Numpy arrays, without pickles: `hpc-grpo model replay` reads them on any machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.staging import RunDisk
from hpc_grpo.types import Minibatch, TrainSequence

_OF_SEQUENCE = ("ordinal", "sample_index")
_OF_TOKENS = tuple(field.name for field in fields(TrainSequence) if field.name not in (*_OF_SEQUENCE, "images"))
_COUNTS = ("num_valid_tokens", "num_sequences")


def save_share(
    disk: RunDisk, folder: Path, rank: int, world_size: int, minibatches: Sequence[Minibatch[TrainSequence]]
) -> None:
    """Write one learner's share of a step to the run's disk, atomically.

    Arrays of tokens are concatenated; `lengths` has the sequences' lengths. An array that a sequence lacks is omitted.
    A prompt's images are stored once.
    """
    sequences = [sequence for minibatch in minibatches for sequence in minibatch.sequences]
    arrays: dict[str, Any] = {
        "world_size": world_size,
        "per_minibatch": [len(minibatch.sequences) for minibatch in minibatches],
        "lengths": np.array([len(sequence.token_ids) for sequence in sequences], np.int64),
        **{name: [getattr(minibatch, name) for minibatch in minibatches] for name in _COUNTS},
        **{name: np.array([getattr(sequence, name) for sequence in sequences], np.int64) for name in _OF_SEQUENCE},
    }
    for name in _OF_TOKENS:
        columns = [getattr(sequence, name) for sequence in sequences]
        if columns and all(column is not None for column in columns):
            arrays[name] = np.concatenate(columns)
    if of_prompts := {sequence.ordinal: sequence.images for sequence in sequences if sequence.images}:
        images = [(ordinal, image) for ordinal, own in of_prompts.items() for image in own]
        arrays["image_ordinals"] = [ordinal for ordinal, _ in images]
        arrays["image_sizes"] = [len(image) for _, image in images]
        arrays["image_bytes"] = np.frombuffer(b"".join(image for _, image in images), np.uint8)
    with disk.new_file(folder / f"rank_{rank}.npz") as file:
        np.savez(file, **arrays)


def read_batches(folder: Path) -> tuple[list[Minibatch[TrainSequence]], int]:
    """Return the minibatches of a step, with the sequences of all learners, and the number of learners.

    Raises ConfigError if a share is missing, damaged, or from another attempt at the step.
    """
    first, world_size = _read_share(folder / "rank_0.npz")
    shares = [first, *(_read_share(folder / f"rank_{rank}.npz")[0] for rank in range(1, world_size))]
    minibatches = []
    for of_ranks in zip(*shares, strict=True):
        sequences = tuple(sequence for minibatch in of_ranks for sequence in minibatch.sequences)
        joined = replace(of_ranks[0], sequences=sequences)
        num_tokens = sum(sequence.num_trained_tokens for sequence in sequences)
        if num_tokens != joined.num_valid_tokens or len(sequences) != joined.num_sequences:
            raise ConfigError(
                f"{folder} is not the record of one step: it has {num_tokens} trained tokens in {len(sequences)} "
                f"sequences, not {joined.num_valid_tokens} in {joined.num_sequences}. Replay another step."
            )
        minibatches.append(joined)
    return minibatches, world_size


def _read_share(path: Path) -> tuple[list[Minibatch[TrainSequence]], int]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        images = defaultdict[int, list[bytes]](list)
        if "image_bytes" in arrays:
            files = np.split(arrays["image_bytes"], np.cumsum(arrays["image_sizes"])[:-1])
            for ordinal, file in zip(arrays["image_ordinals"], files, strict=True):
                images[int(ordinal)].append(file.tobytes())
        sequences = []
        ends = np.cumsum(arrays["lengths"])
        for index, (end, length) in enumerate(zip(ends, arrays["lengths"], strict=True)):
            values: dict[str, Any] = {name: int(arrays[name][index]) for name in _OF_SEQUENCE}
            values |= {name: arrays[name][end - length : end] for name in _OF_TOKENS if name in arrays}
            sequences.append(TrainSequence(**values, images=tuple(images[values["ordinal"]])))
        remaining = iter(sequences)
        counts = zip(arrays["per_minibatch"], *(arrays[name] for name in _COUNTS), strict=True)
        minibatches = [
            Minibatch(tuple(next(remaining) for _ in range(size)), int(num_tokens), int(num_sequences))
            for size, num_tokens, num_sequences in counts
        ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Replay another step.") from error
    return minibatches, int(arrays["world_size"])
