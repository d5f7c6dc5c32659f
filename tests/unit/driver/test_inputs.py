from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_grpo.driver.inputs import refuse_shown_files
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config


def test_a_run_or_data_that_programs_in_the_sandbox_would_see_is_refused(tmp_path: Path) -> None:
    shown = Path(sys.base_prefix) / "lib"
    code, own = [{"name": "code"}], [{"name": "own.py:reward"}]
    refuse_shown_files(minimal_config(run={"root": tmp_path}, rewards=code))
    refuse_shown_files(minimal_config(run={"root": shown}, rewards=[{"name": "math"}]))
    for rewards in (code, own):
        with pytest.raises(ConfigError, match="would see"):
            refuse_shown_files(minimal_config(run={"root": shown}, rewards=rewards))
    with pytest.raises(ConfigError, match="would see"):
        refuse_shown_files(minimal_config(run={"root": tmp_path}, rewards=code, data={"train": {"path": str(shown)}}))
