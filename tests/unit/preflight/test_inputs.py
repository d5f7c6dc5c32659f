"""Model and data on the login node, as a job will find them."""

from __future__ import annotations

from pathlib import Path

from hpc_grpo.config import LaunchConfig, load_config
from hpc_grpo.preflight.findings import Context, Finding
from hpc_grpo.preflight.inputs import data_finding, model_finding

NO_CONFIG = Context(None, LaunchConfig(), {})


def context(environ: dict[str, str], *overrides: str) -> Context:
    config = load_config("local/debug", overrides)
    return Context(config, config.launch, environ)


def cached(home: Path, kind: str, name: str) -> Path:
    snapshot = home / "hub" / f"{kind}--{name.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


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
