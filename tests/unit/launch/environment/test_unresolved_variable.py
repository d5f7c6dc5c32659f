"""An attempt whose launch.env names a variable that its nodes do not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.config import Config
from hpc_grpo.run.paths import RunDir


def test_the_attempt_ends_with_one_clear_error_before_anything_trains(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "data": {"train": {"path": "d"}},
        "train": {"total_steps": 1, "max_tokens_per_microbatch": 8192},
        "launch": {"env": {"TRITON_CACHE_DIR": "$SITE_DISK/triton"}},
    }
    run = RunDir(tmp_path / "r")
    run.create()
    run.config.write_text(yaml.safe_dump(Config.model_validate(values).model_dump(mode="json")))
    run.source.write_text(json.dumps({"working_dir": str(tmp_path)}))
    driver = tmp_path / "driver.py"
    driver.write_text("from pathlib import Path; Path('trained').touch()\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "hpc_grpo.cli", "attempt", str(run.path), "--driver", str(driver)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 78, done.stderr
    told = "launch.env.TRITON_CACHE_DIR = $SITE_DISK/triton: SITE_DISK is not set on "
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    (record,) = [json.loads(path.read_text()) for path in run.attempts.glob("*/attempt.json")]
    assert (record["exit_kind"], record["exit_code"]) == ("config", 78)
    assert record["why"].startswith(told)
    assert not list(tmp_path.rglob("trained"))
