"""Records of what learners trained on: every sequence of a step, each learner's share in a file of its own.

Numpy arrays alone, without pickles: `hpc-grpo replay` reads them on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.disk import RunDisk
from hpc_grpo.types import Minibatch, TrainSequence

_OF_SEQUENCE = ("ordinal", "sample_index")
_OF_TOKENS = tuple(field.name for field in fields(TrainSequence) if field.name not in _OF_SEQUENCE)
_COUNTS = ("num_valid_tokens", "num_sequences")


def save_share(disk: RunDisk, folder: Path, rank: int, world_size: int, minibatches: Sequence[Minibatch]) -> None:
    """Write one learner's share of a step to the run's disk, atomically.

    Arrays of tokens lie end to end, `lengths` long each; one that no sequence has is left out. An older share of the
    same step, of a driver before this one, is replaced.
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
    with disk.new_file(folder / _share(rank)) as file:
        np.savez(file, **arrays)


def read_batches(folder: Path) -> tuple[list[Minibatch], int]:
    """Return the minibatches of a step, whole again, and how many learners shared them.

    Raises ConfigError where a share is missing, damaged, or of another attempt at the step than the others.
    """
    shares = [_read_share(folder / _share(0))]
    world_size = int(shares[0][0])
    shares += [_read_share(folder / _share(rank)) for rank in range(1, world_size)]
    whole = []
    for of_ranks in zip(*(minibatches for _, minibatches in shares), strict=True):
        sequences = tuple(sequence for minibatch in of_ranks for sequence in minibatch.sequences)
        first = replace(of_ranks[0], sequences=sequences)
        num_tokens = sum(sequence.num_trained_tokens for sequence in sequences)
        if num_tokens != first.num_valid_tokens or len(sequences) != first.num_sequences:
            raise ConfigError(
                f"{folder} is not the record of one step: it has {num_tokens} trained tokens in {len(sequences)} "
                f"sequences, of {first.num_valid_tokens} in {first.num_sequences}. Replay another step."
            )
        whole.append(first)
    return whole, world_size


def _share(rank: int) -> str:
    return f"rank_{rank}.npz"


def _read_share(path: Path) -> tuple[int, list[Minibatch]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        sequences = iter(_sequences(arrays))
        counts = zip(arrays["per_minibatch"], *(arrays[name] for name in _COUNTS), strict=True)
        minibatches = [
            Minibatch(tuple(next(sequences) for _ in range(size)), int(num_tokens), int(num_sequences))
            for size, num_tokens, num_sequences in counts
        ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Replay another step.") from error
    return int(arrays["world_size"]), minibatches


def _sequences(arrays: dict[str, Any]) -> Iterator[TrainSequence]:
    ends = np.cumsum(arrays["lengths"])
    for index, (end, length) in enumerate(zip(ends, arrays["lengths"], strict=True)):
        values: dict[str, Any] = {name: int(arrays[name][index]) for name in _OF_SEQUENCE}
        values |= {name: arrays[name][end - length : end] for name in _OF_TOKENS if name in arrays}
        yield TrainSequence(**values)
