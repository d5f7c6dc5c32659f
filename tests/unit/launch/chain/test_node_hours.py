"""What a run's jobs use, and that none asks for more than is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_grpo.config import LaunchConfig, SlurmConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.chain.node_hours import node_hours_asked, node_hours_used, within_node_hours
from hpc_grpo.run.attempt import AttemptRecord

HOUR = 3600.0


def attempt(nodes: int, started_h: float, ended_h: float | None, ends_h: float | None = None) -> AttemptRecord:
    names = [f"nid{number:03}" for number in range(nodes)]
    ends_at = None if ends_h is None else ends_h * HOUR
    record = AttemptRecord(1, "7", "slurm", names, started_h * HOUR, ends_at, 1)
    record.ended_at = None if ended_h is None else ended_h * HOUR
    return record


@pytest.mark.parametrize(
    ("attempts", "used"),
    [
        ([], 0.0),
        ([attempt(2, 0, 1), attempt(4, 5, 5.5)], 4.0),
        ([attempt(2, 0, None, ends_h=8)], 8.0),  # still going on, or so it seems, for four hours
        ([attempt(2, 0, None, ends_h=3)], 6.0),  # killed without a word: no longer than its allocation
        ([attempt(2, 0, None, ends_h=3), attempt(1, 1, 2)], 3.0),  # and the next began before that
        ([replace(attempt(2, 0, None), source="local"), attempt(1, 1, 2)], 1.0),  # a workstation's hours are no job's
        ([attempt(1, 9, None)], 0.0),  # a clock that is behind takes nothing off
    ],
)
def test_node_hours_are_never_counted_too_low(attempts: list[AttemptRecord], used: float) -> None:
    assert node_hours_used(attempts, now=4 * HOUR) == pytest.approx(used)


def launch(max_node_hours: float | None) -> LaunchConfig:
    return LaunchConfig(num_nodes=4, slurm=SlurmConfig(time_min=120, max_node_hours=max_node_hours))


@pytest.mark.parametrize(("ceiling", "used", "minutes"), [(None, 1e6, 120), (20.0, 12.0, 120), (20.0, 14.0, 90)])
def test_a_job_asks_for_no_more_than_is_left(ceiling: float | None, used: float, minutes: int) -> None:
    asked = within_node_hours(launch(ceiling), used)
    assert asked.slurm.time_min == minutes
    assert node_hours_asked(asked) == 4 * minutes / 60


def test_too_little_to_bring_nodes_up_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"taken 19\.8 of launch\.slurm\.max_node_hours = 20: .* 4 node\(s\)"):
        within_node_hours(launch(20.0), 19.8)
