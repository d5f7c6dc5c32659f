"""The other checks of the login node: folders, inputs, environment, secrets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig, load_config
from hpc_grpo.preflight.findings import Context, Finding, failure, guarded, ok
from hpc_grpo.preflight.folders import file_system, judged_run_folder, run_folder_finding
from hpc_grpo.preflight.inputs import data_finding, model_finding
from hpc_grpo.preflight.login import judged_secret_files, proxies_finding, secret_files_finding, variables_finding

NO_CONFIG = Context(None, LaunchConfig(), {})


def context(environ: dict[str, str], *overrides: str) -> Context:
    config = load_config("local/debug", overrides)
    return Context(config, config.launch, environ)


def shell(environ: dict[str, str], **launch: Any) -> Context:
    return Context(None, LaunchConfig(**launch), environ)


def cached(home: Path, kind: str, name: str) -> Path:
    snapshot = home / "hub" / f"{kind}--{name.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nb /scratch lustre rw 0 0\nc /scratch/my\\040disk tmpfs rw 0 0\n"
    assert file_system(Path("/scratch/runs"), mounts) == "lustre"
    assert file_system(Path("/scratch/my disk/x"), mounts) == "tmpfs"
    assert file_system(Path("/scratchy"), mounts) == "ext4"
    assert file_system(Path("/"), "") == "unknown"


@pytest.mark.parametrize(
    ("kind", "free", "status"),
    [("lustre", 900.0, "ok"), ("ext4", 900.0, "ok"), ("tmpfs", 900.0, "warning"), ("lustre", 3.0, "warning")],
)
def test_the_run_folder_is_on_a_disk_that_nodes_share(kind: str, free: float, status: str) -> None:
    found = judged_run_folder(Path("/s/runs"), kind, free)
    assert (found.status, bool(found.fix)) == (status, status != "ok")
    assert kind in found.says


def test_a_run_folder_that_cannot_be_made_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    assert run_folder_finding(tmp_path / "a" / "runs").status != "failure"
    assert list(tmp_path.iterdir()) == []
    found = run_folder_finding(Path("/proc/here/runs"))  # nobody, root included, can write there
    assert found.status == "failure"
    assert "run.root" in found.fix


def test_a_model_is_found_by_path_and_in_the_cache_the_job_uses(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert model_finding(context({}, f"model.path={model}")).status == "failure"  # no weights
    (model / "model.safetensors").touch()
    assert model_finding(context({}, f"model.path={model}")).status == "ok"
    snapshot = cached(tmp_path, "models", "some/model")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    found = model_finding(context({"MINE": str(tmp_path)}, "model.path=some/model", "launch.env.HF_HOME=$MINE"))
    assert found.status == "ok"
    assert str(snapshot) in found.says


def test_a_missing_model_is_a_failure_offline_only(tmp_path: Path) -> None:
    overrides = ["model.path=some/model", f"launch.env.HF_HOME={tmp_path}"]
    assert model_finding(context({}, *overrides)).status == "warning"
    found = model_finding(context({}, *overrides, 'launch.env.HF_HUB_OFFLINE="1"'))
    assert found.status == "failure"
    assert found.fix.startswith("hpc-grpo prefetch CONFIG")
    assert model_finding(NO_CONFIG) == Finding("model", "skipped", "give a CONFIG")


def test_data_are_found_as_files_and_in_the_cache(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    base = [f"data.train.path={rows}", f"data.eval.path={rows}"]
    assert data_finding(context({}, *base)).status == "ok"
    gone = data_finding(context({}, *base, f"data.eval.path={tmp_path}/gone.jsonl"))
    assert (gone.status, "data.eval.path" in gone.fix) == ("failure", True)
    named = [*base, "data.eval.path=some/set", "data.eval.subset=main"]
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = data_finding(context(offline, *named))
    assert found.status == "failure"
    assert "hpc-grpo prefetch CONFIG" in found.fix
    both = data_finding(context(offline, *named, "data.train.path=other/set", "data.train.split=all"))
    assert "other/set and some/set" in both.says
    cached(tmp_path, "datasets", "some/set")
    assert data_finding(context(offline, *named)).status == "ok"


def test_a_path_that_does_not_exist_is_a_failure_online_too(tmp_path: Path) -> None:
    found = model_finding(context({}, f"model.path={tmp_path}/gone"))
    assert (found.status, f"{tmp_path}/gone/config.json" in found.says) == ("failure", True)
    assert data_finding(context({}, f"data.train.path={tmp_path}/gone")).status == "failure"


def test_secret_files_must_be_the_users_alone(tmp_path: Path) -> None:
    token = tmp_path / "token"
    here = context({"HOME": str(tmp_path), "HF_TOKEN_PATH": str(token)}, f"run.root={tmp_path}")
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
    ray_token.chmod(0o644)
    assert str(ray_token) in secret_files_finding(here).fix
    assert judged_secret_files({Path("/a"): 0o100600, Path("/b"): 0o100604}).fix == "chmod 600 /b"


def test_variables_that_leak_are_named_without_their_values() -> None:
    found = variables_finding(shell({"RANK": "3", "MASTER_ADDR": "h", "SLURM_JOB_ID": "1", "HOME": "/h"}))
    assert (found.status, found.says) == ("ok", "kept out of training: MASTER_ADDR, RANK")
    early = variables_finding(shell({"LD_PRELOAD": "/x.so"}))
    assert (early.status, "unset LD_PRELOAD" in early.fix) == ("warning", True)
    assert variables_finding(shell({}, pass_env=["SLURM_*"])).status == "warning"
    secret = variables_finding(shell({}, env={"WANDB_API_KEY": "hunter2-hunter2"}))
    assert secret.status == "failure"
    assert "WANDB_API_KEY" in secret.says
    assert "hunter2" not in secret.says + secret.fix
    closed = variables_finding(shell({}, slurm={"extra": {"export": "NONE"}}))
    assert (closed.status, "export = NONE" in closed.says) == ("warning", True)
    assert variables_finding(shell({}, slurm={"extra": {"export": "ALL,A=1"}})).status == "ok"


@pytest.mark.parametrize(
    ("environ", "launch", "status", "told"),
    [
        ({}, {}, "ok", "none"),
        ({"https_proxy": "http://p:1"}, {}, "warning", "stays behind"),
        ({"https_proxy": "http://p:1", "HF_HUB_OFFLINE": "1"}, {}, "warning", "without no_proxy"),
        ({"https_proxy": "http://p:1", "HF_HUB_OFFLINE": "1", "no_proxy": "10.0.0.0/8"}, {}, "ok", "kept out"),
        ({"https_proxy": "http://p:1", "NO_PROXY": "n1"}, {"pass_env": ["https_proxy"]}, "ok", "let through"),
    ],
)
def test_proxies(environ: dict[str, str], launch: dict[str, Any], status: str, told: str) -> None:
    found = proxies_finding(shell(environ, **launch))
    assert found.status == status
    assert told in found.says
    assert bool(found.fix) == (status == "warning")
    assert "http://p" not in found.says + found.fix


def test_a_check_that_breaks_is_a_failure_that_names_the_error() -> None:
    def broken() -> Finding:
        raise PermissionError(13, "Permission denied", "/secret/place")

    found = guarded("model", broken)
    assert (found.check, found.status) == ("model", "failure")
    assert "PermissionError" in found.says
    assert "/secret/place" in found.says
    assert found.fix
    assert guarded("model", lambda: ok("model", "fine")).status == "ok"
    assert guarded("model", lambda: failure("model", "gone", "fetch it")).fix == "fetch it"


def test_a_check_that_hangs_is_given_up() -> None:
    go_on = threading.Event()

    def hanging() -> Finding:
        go_on.wait()
        return ok("run folder", "too late")

    found = guarded("run folder", hanging, deadline_s=0.2)
    go_on.set()
    assert (found.status, "did not end within" in found.says) == ("failure", True)
    assert found.fix
