"""Model and data on the login node, as a job will find them."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.preflight.findings import Context, Finding
from hpc_grpo.preflight.inputs import input_findings, missing_inputs
from tests.support.configs import minimal_config
from tests.support.model_folders import make_model

PREFETCH = "hpc-grpo cluster prefetch CONFIG, on a login node"


def context(environ: dict[str, str] | None = None, **sections: Any) -> Context:
    config = minimal_config(**sections)
    return Context(config, config.launch, environ or {})


def model_finding(own: Context) -> Finding:
    return input_findings(own)["model"]


def data_finding(own: Context) -> Finding:
    return input_findings(own)["data"]


def cached(home: Path, kind: str, name: str) -> Path:
    snapshot = home / "hub" / f"{kind}--{name.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_model_folder_needs_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = context(model={"path": str(tmp_path)})
    make_model(tmp_path, {}, left_out="pytorch_model.bin")
    found = model_finding(here)
    assert (found.status, found.fix) == ("failure", "correct what the error names")
    assert "Copy the original model's files" in found.says
    make_model(tmp_path, {})
    assert model_finding(here) == Finding("ok", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    found = model_finding(context(model={"path": f"./{tmp_path.name}"}))
    assert found == Finding("ok", f"./{tmp_path.name} is in {tmp_path}")


def test_a_mixture_of_experts_is_a_failure_unless_nothing_is_sampled(tmp_path: Path) -> None:
    make_model(tmp_path, {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": 64})
    found = model_finding(context(model={"path": str(tmp_path)}))
    assert (found.status, found.fix) == ("failure", "correct what the error names")
    assert "OlmoeForCausalLM is a mixture of experts (num_experts = 64)" in found.says
    assert model_finding(context(model={"path": str(tmp_path)}, task="sft")).status == "ok"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "qwen2_5_vl is a model of images and text"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "do not compute attn_logit_softcapping = 50.0"),
        ({"model_type": "gemma4", "text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping = 30.0"),
    ],
)
def test_a_model_that_learners_cannot_compute_is_a_failure_whatever_it_is_trained_by(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_model(tmp_path, settings)
    for task in ("grpo", "sft"):
        found = model_finding(context(model={"path": str(tmp_path)}, task=task))
        assert found.status == "failure"
        assert says in found.says


def test_a_model_by_name_is_found_in_the_cache_that_launch_env_names(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "models", "some/model")
    make_model(snapshot, {})
    launch = {"env": {"HF_HOME": "$MINE"}}
    found = model_finding(context({"MINE": str(tmp_path)}, model={"path": "some/model"}, launch=launch))
    assert (found.status, found.says) == ("ok", f"some/model is in {snapshot}")


@pytest.mark.parametrize(("offline", "status"), [({}, "warning"), ({"HF_HUB_OFFLINE": "1"}, "failure")])
def test_a_model_that_is_not_cached_is_a_failure_only_offline(
    offline: dict[str, str], status: str, tmp_path: Path
) -> None:
    launch = {"env": {"HF_HOME": str(tmp_path), **offline}}
    found = model_finding(context(model={"path": "some/model"}, launch=launch))
    assert (found.status, found.fix) == (status, PREFETCH)


def test_without_a_config_nothing_is_looked_for() -> None:
    nothing = Context(None, LaunchConfig(), {})
    assert model_finding(nothing) == Finding("skipped", "give a CONFIG")
    assert data_finding(nothing) == Finding("skipped", "give a CONFIG")


def test_data_files_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    monkeypatch.chdir(tmp_path)
    found = data_finding(context(data={"train": {"path": "rows.jsonl"}, "eval": {"path": str(rows)}}))
    assert found == Finding("ok", str(rows))
    gone = {"path": f"{tmp_path}/gone.jsonl"}
    found = data_finding(context(data={"train": {"path": str(rows)}, "eval": gone}, eval={"every": 1}))
    assert (found.status, "data.eval.path" in found.fix) == ("failure", True)


def test_data_sets_by_name_are_found_in_the_cache(tmp_path: Path) -> None:
    train = {"path": "other/set", "split": "all"}
    held_out = {"path": "some/set", "subset": "main"}
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    here = context(offline, data={"train": train, "eval": held_out})
    missing = data_finding(here)
    assert (missing.status, missing.fix) == ("failure", PREFETCH)
    assert "other/set and some/set" in missing.says
    cached(tmp_path, "datasets", "some/set")
    assert "other/set" in data_finding(here).says and "some/set" not in data_finding(here).says
    cached(tmp_path, "datasets", "other/set")
    assert data_finding(here) == Finding("ok", "other/set, some/set")


def test_a_path_that_does_not_exist_is_a_failure_online_too(tmp_path: Path) -> None:
    found = model_finding(context(model={"path": f"{tmp_path}/gone"}))
    assert (found.status, f"{tmp_path}/gone/config.json" in found.says) == ("failure", True)
    assert data_finding(context(data={"train": {"path": f"{tmp_path}/gone"}})).status == "failure"


@pytest.mark.parametrize("section", ["rewards", "name", "advantage"])
def test_a_file_with_a_function_of_the_users_must_exist(section: str, tmp_path: Path) -> None:
    """Given a file in the working directory for one of them and none for another, only the latter is missing."""
    named = {"rewards": [{"name": "mine.py:f"}]} if section == "rewards" else {"loss": {section: "mine.py:f"}}
    key = {"rewards": "rewards.0.name", "name": "loss.name", "advantage": "loss.advantage.name"}[section]
    config = minimal_config(**named)
    assert dict(missing_inputs(config, tmp_path))[key].startswith(f"{key} = mine.py:f: ")
    (tmp_path / "mine.py").write_text("def f(): ...")
    assert key not in dict(missing_inputs(config, tmp_path))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def g(): ...", "mine.py has no 'f'. It has: g"),
        ("def f(:", "mine.py is not Python: "),
        ("from other import f", ""),
        ("from other import *", ""),
        ("globals()['f'] = print", ""),
        ("if True:\n    f = print", ""),
    ],
)
@pytest.mark.parametrize("name", ["mine.py:f", "mine:f"])
def test_a_file_must_have_the_function_unless_only_its_run_shows_that(
    name: str, code: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    found = dict(missing_inputs(minimal_config(rewards=[{"name": name}]), tmp_path)).get("rewards.0.name", "")
    assert (says in found, bool(found)) == (True, bool(says))


@pytest.mark.parametrize("name", ["mine.py:f", "my_rewards:f"])
def test_the_doctor_misses_the_code_of_a_reward(name: str) -> None:
    found = input_findings(context(rewards=[{"name": name}]))["inputs"]
    assert (found.status, f"rewards.0.name = {name}: there is no " in found.says) == ("failure", True)


@pytest.mark.parametrize(
    ("name", "is_missing"),
    [("mylib:f", False), ("mylib.part:f", False), ("mylib.gone:f", True), ("os.path:f", False), ("six.moves:f", False)],
)
def test_a_module_that_only_the_job_finds_is_not_missed(name: str, is_missing: bool, tmp_path: Path) -> None:
    """One below launch.env.PYTHONPATH, and modules that others make as they are imported."""
    (tmp_path / "lib" / "mylib").mkdir(parents=True)
    for file in ("mylib/__init__.py", "mylib/part.py", "six.py"):
        (tmp_path / "lib" / file).touch()
    config = minimal_config(rewards=[{"name": name}], launch={"env": {"PYTHONPATH": f"/nowhere:{tmp_path}/lib"}})
    assert ("rewards.0.name" in dict(missing_inputs(config, tmp_path))) == is_missing


def test_modules_are_not_judged_where_the_jobs_path_is_not_known(tmp_path: Path) -> None:
    config = minimal_config(rewards=[{"name": "mylib:f"}], launch={"env": {"PYTHONPATH": "$OF_A_JOB_ALONE/lib"}})
    assert "rewards.0.name" not in dict(missing_inputs(config, tmp_path))


def test_a_chat_template_must_exist(tmp_path: Path) -> None:
    config = minimal_config(data={"train": {"path": "d"}, "template": "chat.jinja"})
    assert "chat.jinja: there is no" in dict(missing_inputs(config, tmp_path))["data.template"]
    (tmp_path / "chat.jinja").touch()
    assert "data.template" not in dict(missing_inputs(config, tmp_path))


@pytest.mark.parametrize(
    ("row", "status", "says"),
    [("{}", "ok", "Bad: an episode began"), ('{"raises": true}', "failure", "no such level")],
)
def test_the_doctor_begins_an_episode_of_each_environment(tmp_path: Path, row: str, status: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    file = Path(__file__).parents[1] / "episodes" / "playing.py"
    own = context(
        environment={"name": f"{file}:Bad", "num_workers": 1},
        data={"train": {"path": str(tmp_path / "rows.jsonl"), "prompt_field": None, "answer_field": None}},
        eval={"every": None},
    )
    found = input_findings(own)["environments"]
    assert found.status == status
    assert says in found.says


def test_the_doctor_gives_environments_the_answer_of_a_row_as_training_does(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Which?", "solution": "go"}\n')
    (tmp_path / "own.py").write_text(
        "class Own:\n    def reset(self, row, seed):\n        return row['answer']\n    def step(self, message): ...\n"
    )
    own = context(
        environment={"name": f"{tmp_path / 'own.py'}:Own", "num_workers": 1},
        data={"train": {"path": str(tmp_path / "rows.jsonl"), "answer_field": "solution"}},
        eval={"every": None},
    )
    found = input_findings(own)["environments"]
    assert found.status == "ok", found.says


def test_the_doctor_gives_environments_rows_as_training_does(tmp_path: Path) -> None:
    table = pa.table({"first": ["go"], "day": [date(2026, 11, 28)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    file = Path(__file__).parents[1] / "episodes" / "playing.py"
    own = context(
        environment={"name": f"{file}:Bad", "num_workers": 1},
        data={"train": {"path": str(tmp_path / "rows.parquet"), "prompt_field": None, "answer_field": None}},
        eval={"every": None},
    )
    found = input_findings(own)["environments"]
    assert (found.status, found.says) == ("ok", f"{file}:Bad: an episode began")
