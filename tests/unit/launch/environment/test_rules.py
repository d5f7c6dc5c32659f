"""The allow-list lets through what training needs and nothing else, and launch.env names what the node has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.config import to_yaml
from hpc_grpo.launch.environment import (
    ALLOWED,
    ALLOWED_PREFIXES,
    DENIED,
    DENIED_PREFIXES,
    expand,
    filtered,
)
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config


def test_every_entry_has_a_reason() -> None:
    for table in (ALLOWED, ALLOWED_PREFIXES, DENIED, DENIED_PREFIXES):
        assert all(reason.strip() for reason in table.values())


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HF_HOME", "WANDB_API_KEY", "NCCL_DEBUG", "FI_PROVIDER", "CUDA_VISIBLE_DEVICES", "CPATH"),
        *("OFI_NCCL_PROTOCOL", "UCX_TLS", "CXI_FORK_SAFE", "SLINGSHOT_VNIS", "IBV_FORK_SAFE", "PSM2_DEVICES"),
    ],
)
def test_a_variable_that_training_needs_gets_through(name: str) -> None:
    assert filtered({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "SBATCH_ACCOUNT",
        "PMI_RANK",
        "PYTHONPATH",
        "LD_PRELOAD",
        "RANK",
        "MASTER_ADDR",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_ADDRESS",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "https_proxy",
        "SOME_VARIABLE",
    ],
)
def test_a_variable_nobody_asked_for_stays_behind(name: str) -> None:
    assert filtered({name: "value"}) == {}


def test_pass_env_names_variables_and_prefixes_but_not_denied_ones() -> None:
    environ = {"MINE": "1", "APP_A": "2", "APP_B": "3", "OTHER": "4", "SLURM_JOB_ID": "5"}
    assert filtered(environ, ["MINE", "APP_*", "SLURM_JOB_ID"]) == {"MINE": "1", "APP_A": "2", "APP_B": "3"}


def test_env_is_set_on_top_with_this_nodes_variables() -> None:
    environ = {"LOCALDIR": "/local/7", "NCCL_DEBUG": "INFO"}
    env = filtered(environ, env={"TRITON_CACHE_DIR": "$LOCALDIR/triton", "NCCL_DEBUG": "WARN"})
    assert env == {"LOCALDIR": "/local/7", "NCCL_DEBUG": "WARN", "TRITON_CACHE_DIR": "/local/7/triton"}


def test_a_proxy_that_is_asked_for_spares_the_nodes() -> None:
    environ = {"https_proxy": "http://proxy:3128", "no_proxy": ".site"}
    env = filtered(environ, ["https_proxy"], nodes=["10.0.0.1"])
    assert env["https_proxy"] == "http://proxy:3128"
    assert env["no_proxy"] == env["NO_PROXY"] == ".site,localhost,127.0.0.1,10.0.0.1"


def test_expand_leaves_an_unknown_name_as_it_is() -> None:
    assert expand("${A}/$B/$C", {"A": "1", "B": "2"}) == "1/2/$C"


def test_an_unknown_variable_in_launch_env_ends_the_attempt_before_anything_trains(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    run.config.write_text(to_yaml(minimal_config(launch={"env": {"TRITON_CACHE_DIR": "$SITE_DISK/triton"}})))
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
