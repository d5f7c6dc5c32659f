"""`hpc-grpo plan` on a run directory, and which settings it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_grpo.cli import main
from hpc_grpo.errors import ConfigError
from hpc_grpo.simulate.cluster import Setting
from hpc_grpo.simulate.text import settings_of
from tests.support.configs import minimal_config
from tests.unit.simulate.runs import line, write_run


def test_a_run_is_simulated_as_it_was_and_elsewhere(tmp_path: Path) -> None:
    tokens = [800.0, 600.0, 1000.0, 700.0]
    lines = [line(n, wait=2.0, train=own / 400, publish=0.5, tokens=own) for n, own in enumerate(tokens, start=1)]
    run, _ = write_run(tmp_path, lines, total_steps=20)
    arguments = ["plan", str(run.path), "--nodes", "1,4", "--lag", "0,1"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    first, *others = result.output.splitlines()
    assert result.exit_code == 0
    assert first.startswith("4 steps measured on 1 node: 811.3 steps/h; simulated as it was: 8")
    assert abs(float(first.split("(")[1].split("%")[0])) < 5.0
    rows = [row.split() for row in others[others.index("") + 2 :]]
    table = rows[: rows.index([])]
    assert [row[:4] for row in table] == [
        ["1", "1", "2", "0"],
        ["*1", "1", "2", "1"],
        ["4", "1", "2", "0"],
        ["*4", "1", "2", "1"],
    ]
    faster, slower = (float(table[index][5].replace(",", "")) for index in (1, 0))
    assert faster > 1.2 * slower, "engines sample ahead"
    assert "node-hours are those of 16 steps: those to the end." in result.output


def test_numbers_that_are_none_are_refused() -> None:
    result = CliRunner().invoke(main, ["plan", "RUN", "--nodes", "2,x"])
    assert result.exit_code == 78
    assert "give whole numbers of at least 1" in result.output


def test_learners_and_engines_share_the_places_of_a_node() -> None:
    config = minimal_config(engine={"engines_per_node": 3, "tensor_parallel": 2})
    assert settings_of(config, [2], [1, 3], [0]) == [Setting(2, 1, 3, 0), Setting(2, 3, 2, 0)]
    with pytest.raises(ConfigError, match=r"--learners 6: a node has 7 places .* Ask for 1 to 5"):
        settings_of(config, [2], [6], None)


def test_where_gpus_are_shared_in_turn_there_is_nothing_to_split() -> None:
    config = minimal_config(placement={"colocate": True, "learners_per_node": 2}, engine={"engines_per_node": 2})
    assert settings_of(config, [1, 2], None, None) == [Setting(1, 2, 2, 0), Setting(2, 2, 2, 0)]
    with pytest.raises(ConfigError, match=r"--learners is 2 and --lag 0\. Leave both out"):
        settings_of(config, [1], None, [1])
