from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpc_grpo.data.encoder import Encoder
from hpc_grpo.data.workers import Batch, encode_batches
from hpc_grpo.errors import ConfigError, HpcGrpoError
from tests.support.configs import minimal_config
from tests.support.encoding import NumberingEncoder
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[3]
_DEADLINE_S = 60.0


def batches(count: int, **of: dict[str, Any]) -> Iterator[Batch]:
    """Yield batches of two items; `of` names the batch, as batch_3, whose first item has these columns."""
    for number in range(count):
        yield [of.get(f"batch_{number}", {}), {}], 2 * number


def numbered(made: Iterator[Any], into: list[Any]) -> list[Any]:
    into.extend(row for rows in made for row in rows)
    return into


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def test_rows_are_the_same_to_the_bit_with_any_number_of_processes(
    make_tokenizer: Callable[..., Any], chat_template: str
) -> None:
    config = minimal_config()
    ((_, source),) = config.data.sources(for_eval=False)
    encoder = Encoder(config, source, make_tokenizer(chat_template))

    def items() -> Iterator[Batch]:
        for first in range(0, 600, 100):
            yield [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(first, first + 100)], first

    rows = [[row for made in encode_batches(encoder, items(), n, num_alone=1) for row in made] for n in (1, 2)]
    assert len(rows[0]) == 600
    assert rows[0] == rows[1]


def test_batches_come_in_order_though_a_later_one_is_ready_first_and_all_processes_work() -> None:
    there_before = children()
    of = {"batch_2": {"sleeps_s": 0.5}}
    rows = numbered(encode_batches(NumberingEncoder(), batches(9, **of), 3, num_alone=2), [])  # type: ignore[arg-type]
    assert [number for number, _ in rows] == list(range(18))
    made_by = [process for _, process in rows]
    assert set(made_by[:4]) == {os.getpid()}
    assert len(set(made_by[4:])) == 3
    assert os.getpid() not in made_by[4:]
    assert children() == there_before


def test_few_items_start_no_process() -> None:
    rows = numbered(encode_batches(NumberingEncoder(), batches(5), 2), [])  # type: ignore[arg-type]
    assert {process for _, process in rows} == {os.getpid()}


@pytest.mark.parametrize(
    ("column", "error", "words"),
    [("is_bad", ConfigError, r"^Item 6 cannot be used\.$"), ("kills", HpcGrpoError, "ended with exit code -9")],
)
def test_an_item_that_cannot_be_used_and_a_process_that_dies_end_it_behind_what_was_whole(
    column: str, error: type[Exception], words: str
) -> None:
    there_before, rows = children(), []
    made = encode_batches(NumberingEncoder(), batches(9, batch_3={column: True}), 2, num_alone=0)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        numbered(made, rows)
    assert [number for number, _ in rows] == list(range(6))
    assert children() == there_before


def test_a_process_that_dies_between_two_batches_is_told_of_as_such() -> None:
    there_before = children()

    def items() -> Iterator[Batch]:
        yield from batches(2)
        for worker in [child for child in psutil.Process().children() if child.pid not in there_before]:
            worker.kill()
            wait_until(lambda worker=worker: worker.status() == psutil.STATUS_ZOMBIE, "it is dead")  # type: ignore[misc]
        yield [{}], 4

    with pytest.raises(HpcGrpoError, match="ended with exit code -9"):
        numbered(encode_batches(NumberingEncoder(), items(), 2, num_alone=0), [])  # type: ignore[arg-type]
    assert children() == there_before


def test_processes_end_when_their_parent_is_killed() -> None:
    program = """if True:
        from hpc_grpo.data.workers import encode_batches
        from tests.support.encoding import NumberingEncoder
        endless = (([{}], number) for number in range(10**9))
        for rows in encode_batches(NumberingEncoder(), endless, 2, num_alone=0):
            print(rows[0][1], flush=True)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    workers = {psutil.Process(int(parent.stdout.readline())) for _ in range(2)}
    assert len(workers) == 2
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + _DEADLINE_S
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < deadline, "a process that tokenizes outlived its parent"
        time.sleep(0.02)
