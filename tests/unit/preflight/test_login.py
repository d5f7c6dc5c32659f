"""The environment and the secrets of the login node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.preflight.findings import Context
from hpc_grpo.preflight.login import proxies_finding, secret_files_finding, variables_finding
from tests.support.configs import minimal_config


def shell(environ: dict[str, str], **launch: Any) -> Context:
    return Context(None, LaunchConfig(**launch), environ)


def test_secret_files_must_be_the_users_alone(tmp_path: Path) -> None:
    token = tmp_path / "token"
    config = minimal_config(run={"name": "debug", "root": tmp_path})
    here = Context(config, config.launch, {"HOME": str(tmp_path), "HF_TOKEN_PATH": str(token)})
    assert secret_files_finding(here).status == "skipped"
    token.write_text("a-secret")
    token.chmod(0o600)
    assert secret_files_finding(here).status == "ok"
    token.chmod(0o640)
    found = secret_files_finding(here)
    assert (found.status, found.fix) == ("failure", f"chmod 600 {token}")
    assert "0640" in found.says
    ray_token = tmp_path / "debug" / ".secret" / "ray_token"
    ray_token.parent.mkdir(parents=True)
    ray_token.write_text("x")
    ray_token.chmod(0o604)
    assert str(ray_token) in secret_files_finding(here).fix
    token.chmod(0o600)
    assert secret_files_finding(here).fix == f"chmod 600 {ray_token}"


def test_variables_that_leak_are_named_without_their_values() -> None:
    found = variables_finding(shell({"RANK": "3", "MASTER_ADDR": "h", "SLURM_JOB_ID": "1", "HOME": "/h"}))
    assert (found.status, found.says) == ("ok", "kept out of training: MASTER_ADDR, RANK")
    early = variables_finding(shell({"LD_PRELOAD": "/x.so"}))
    assert (early.status, "unset LD_PRELOAD" in early.fix) == ("warning", True)
    assert variables_finding(shell({}, pass_env=["SLURM_*"])).status == "warning"
    closed = variables_finding(shell({}, slurm={"extra": {"export": "NONE"}}))
    assert (closed.status, "export = NONE" in closed.says) == ("warning", True)
    assert variables_finding(shell({}, slurm={"extra": {"export": "ALL,A=1"}})).status == "ok"


@pytest.mark.parametrize(
    ("launch", "key"),
    [
        ({"env": {"WANDB_API_KEY": "hunter2-hunter2"}}, "WANDB_API_KEY"),
        ({"setup_lines": ["export PGPASS=hunter2"]}, "launch.setup_lines.0"),
    ],
)
def test_a_secret_in_the_config_is_named_without_its_value(launch: dict[str, Any], key: str) -> None:
    config = minimal_config(launch=launch)
    secret = variables_finding(Context(config, config.launch, {}))
    assert (secret.status, key in secret.says) == ("failure", True)
    assert "hunter2" not in secret.says + secret.fix


@pytest.mark.parametrize(
    ("environ", "launch", "status", "says"),
    [
        ({}, {}, "ok", "none"),
        ({"https_proxy": "http://p:1"}, {}, "warning", "does not reach training"),
        ({"https_proxy": "http://p:1", "HF_HUB_OFFLINE": "1"}, {}, "warning", "without no_proxy"),
        ({"https_proxy": "http://p:1", "HF_HUB_OFFLINE": "1", "no_proxy": "10.0.0.0/8"}, {}, "ok", "kept out"),
        ({"https_proxy": "http://p:1", "NO_PROXY": "n1"}, {"pass_env": ["https_proxy"]}, "ok", "let through"),
    ],
)
def test_a_proxy_that_stays_behind_or_lacks_no_proxy_is_a_warning(
    environ: dict[str, str], launch: dict[str, Any], status: str, says: str
) -> None:
    found = proxies_finding(shell(environ, **launch))
    assert found.status == status
    assert says in found.says
    assert bool(found.fix) == (status == "warning")
    assert "http://p" not in found.says + found.fix
