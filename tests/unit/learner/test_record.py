from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.actor import LearnerActor
from hpc_grpo.learner.record import read_batches, save_share
from hpc_grpo.learner.staging import RunDisk
from hpc_grpo.metrics.reductions import Mean
from hpc_grpo.types import Minibatch, TrainSequence
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence


def sequence(ordinal: int, num_tokens: int) -> TrainSequence:
    made = ordinary_sequence(ordinal, 1, range(5, 5 + num_tokens), 2, [-0.25, -1 / 3], advantage=0.1 + ordinal)
    return replace(made, policy_versions=np.full(num_tokens, ordinal, np.int32))


SHARES = [
    [Minibatch((sequence(0, 3), sequence(2, 7)), 6, 3), Minibatch((), 2, 1)],
    [Minibatch((sequence(1, 4),), 6, 3), Minibatch((sequence(3, 5),), 2, 1)],
]


def save(folder: Path, shares: list[list[Minibatch]] = SHARES) -> None:
    for rank, share in enumerate(shares):
        save_share(RunDisk(), folder, rank, len(shares), share)


def test_what_learners_saved_is_read_back_to_the_last_bit_and_whole(tmp_path: Path) -> None:
    save(tmp_path)
    minibatches, num_learners = read_batches(tmp_path)
    assert num_learners == 2
    assert [(each.num_valid_tokens, each.num_sequences) for each in minibatches] == [(6, 3), (2, 1)]
    assert [[each.ordinal for each in minibatch.sequences] for minibatch in minibatches] == [[0, 2, 1], [3]]
    given = [each for share in SHARES for minibatch in share for each in minibatch.sequences]
    read = [each for minibatch in minibatches for each in minibatch.sequences]
    in_order = [sorted(each, key=lambda sequence: sequence.ordinal) for each in (given, read)]
    for before, after in zip(*in_order, strict=True):
        assert vars(before).keys() == vars(after).keys()
        for name, value in vars(before).items():
            assert np.array_equal(value, getattr(after, name)), name
            assert getattr(value, "dtype", None) == getattr(getattr(after, name), "dtype", None), name


def test_sequences_that_no_engine_sampled_have_no_versions_afterwards_either(tmp_path: Path) -> None:
    save(tmp_path, [[Minibatch((ordinary_sequence(0, 0, [5, 6, 7], 2),), 2, 1)]])
    (minibatch,), _ = read_batches(tmp_path)
    assert minibatch.sequences[0].policy_versions is None


def test_a_share_that_an_attempt_with_other_learners_left_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    save(tmp_path)
    save_share(RunDisk(), tmp_path, 0, 2, [replace(SHARES[0][0], sequences=SHARES[0][0].sequences[:1]), SHARES[0][1]])
    with pytest.raises(
        ConfigError, match=r"not the record of one step: it has 4 trained tokens in 2 sequences, not 6 in 3"
    ):
        read_batches(tmp_path)


def test_a_full_disk_costs_the_record_and_not_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learner that waited for space would hear of no request to stop."""

    class FullDisk(RunDisk):
        @contextmanager
        def new_file(self, path: Path) -> Iterator[BinaryIO]:
            with super().new_file(path), Path("/dev/full").open("wb") as full:
                yield full

    actor: Any = LearnerActor.__new__(LearnerActor)
    actor._config, actor._rank, actor._world_size, actor._sequences = minimal_config(), 0, 1, list
    files, trained = SimpleNamespace(disk=FullDisk()), {"loss/policy": Mean(1.0)}
    actor._learner = SimpleNamespace(files=files, train_step=lambda *_: trained)
    assert actor.train(SHARES[0], tmp_path, None) == trained
    assert "The step's batch was not kept: [Errno 28]" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"rank_0.npz cannot be read"):
        read_batches(tmp_path)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:90])])
def test_a_damaged_share_is_refused_by_its_name(tmp_path: Path, damage: object) -> None:
    save(tmp_path)
    damage(tmp_path / "rank_1.npz")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"rank_1.npz cannot be read"):
        read_batches(tmp_path)
