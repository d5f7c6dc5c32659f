from __future__ import annotations

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.slurm.text import counts_per_node, minutes, unix_time


@pytest.mark.parametrize(
    ("text", "num_nodes", "counts"),
    [("72(x2),36", 3, (72, 72, 36)), ("4", 1, (4,)), ("2,4(x3)", 4, (2, 4, 4, 4))],
)
def test_counts_per_node(text: str, num_nodes: int, counts: tuple[int, ...]) -> None:
    assert counts_per_node(text, num_nodes) == counts


def test_counts_in_another_form_are_refused_by_name() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_JOB_CPUS_PER_NODE = '4\*2' is not in a known form"):
        counts_per_node("4*2", 2)


@pytest.mark.parametrize("text", ["Unknown", "N/A", ""])
def test_a_time_that_is_none_is_not_known(text: str) -> None:
    assert unix_time(text) is None


def test_time_limits() -> None:
    limits = ("00:03:00", "23:59:59", "2-00:00:00", "UNLIMITED", "")
    assert [minutes(limit) for limit in limits] == [3, 1440, 2880, None, None]
    given = ("30", "90:30", "0:01", "1-0", "1-2", "1-2:30", "1-2:30:01", "0:90:00", "1-", ":30", "1:2:3:4")
    assert [minutes(limit) for limit in given] == [30, 91, 1, 1440, 1560, 1590, 1591, 90, None, None, None]
