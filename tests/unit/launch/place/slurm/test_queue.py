"""The last answer of squeue, and who may ask again. What `status --slurm` makes of it is tested with the report."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.slurm import queue
from hpc_grpo.launch.place.slurm.queue import QueueAnswer, cache_path, queue_answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    asked: list[Sequence[str]] = []

    def output_of(argv: Sequence[str]) -> str:
        asked.append(argv)
        return "11|PENDING|N/A|Priority\n"

    monkeypatch.setattr(queue, "output_of", output_of)
    return asked


def test_the_answer_is_the_users_whatever_the_run(tmp_path: Path) -> None:
    assert cache_path({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/hpc-grpo/slurm_queue.json")
    assert cache_path({}) == Path("~/.cache/hpc-grpo/slurm_queue.json").expanduser()


def test_who_waits_for_another_to_ask_takes_its_answer(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    cache = tmp_path / "new" / "answer.json"
    cache.parent.mkdir()
    answers: list[QueueAnswer] = []
    with FileLock(cache.with_suffix(".lock")):
        threads = [threading.Thread(target=lambda: answers.append(queue_answer(["11"], cache))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert asked == []
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert {answer.jobs["11"].state for answer in answers} == {"PENDING"}


def test_a_folder_that_is_not_there_yet_is_made(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    assert queue_answer(["11"], tmp_path / "not" / "there" / "answer.json").jobs["11"].reason == "Priority"


def test_a_folder_that_cannot_be_used_is_named_with_the_way_out(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"file, cannot be used .*XDG_CACHE"):
        queue_answer(["11"], tmp_path / "file" / "answer.json")
    assert asked == []


def test_an_answer_of_another_version_is_asked_for_again(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    cache = tmp_path / "answer.json"
    cache.write_text('{"asked_at": 9e9, "jobs": {"11": {"other": 1}}}')
    queue_answer(["11"], cache)
    assert len(asked) == 1
