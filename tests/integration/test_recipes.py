"""Each recipe of the docs trains: its config, its data and its functions, with a tiny model and two steps put in."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.demo.model import write_model
from tests.integration.test_reward_server import TOKEN, start_server
from tests.integration.training_runs import LONG, complete_in_cluster, metrics_of, run_to_end
from tests.support.command import call
from tests.support.places import FakeQueue
from tests.support.processes import free_port

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
_FILE = re.compile(r"^```(?:yaml|python)\n# (\w+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"`(\w+\.jsonl)`[^`]*```json\n(.*?)\n```", re.DOTALL)

pytestmark = pytest.mark.integration

SMALL: dict[str, Any] = {
    "model": {"dtype": "float32", "device": "cpu"},
    "data": {"held_out": None, "max_prompt_tokens": 2048},
    "grading": {"num_workers": 1},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8},
    "engine": {"engines_per_node": 1, "vllm": {"max_num_seqs": 8}, "kv_cache_gib": 0.0625},
    "train": {"total_steps": 1, "total_epochs": None, "zero_stage": 1, "max_tokens_per_microbatch": 4096},
    "eval": {"every": None},
    "launch": {"object_store_gib": 0.1},
}


def recipe(heading: str) -> str:
    return re.split(r"^## ", RECIPES.read_text().split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture
def files(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cluster's working directory, with every file of the recipes. Each row of data stands there eight times."""
    text = RECIPES.read_text()
    for name, content in _FILE.findall(text):
        (workspace / name).write_text(content)
    for name, row in _ROW.findall(text):
        values = json.loads(row)
        prompt, question = next(iter(values.items()))
        rows = [{**values, prompt: f"{question} ({number})"} for number in range(8)]
        (workspace / name).write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    (workspace / "tiny.jinja").write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    write_model(workspace / "tiny", replace(LONG, max_tokens=4096), seed=0)
    monkeypatch.chdir(workspace)
    return workspace


def small(files: Path, name: str, **changes: Mapping[str, Any]) -> Path:
    """The config of a recipe in its small form; `changes` are of its sections."""
    values = yaml.safe_load((files / name).read_text())
    of_engines = {"engine", "rollout", "eval"} if values.get("task", {}).get("name") == "sft" else set()
    for section in {**SMALL, **changes}:
        if section not in of_engines:
            values[section] = {**values.get(section, {}), **SMALL.get(section, {}), **changes.get(section, {})}
    if not Path(values["model"]["path"]).exists():
        values["model"]["path"] = "tiny"
    values["model"]["path"] = str(Path(values["model"]["path"]).resolve())
    values["data"]["template"] = str(files / "tiny.jinja")
    if "teacher" in values.get("task", {}).get("args", {}):
        values["task"]["args"]["teacher"] = str(files / "tiny")
    values["run"]["root"] = str(files / "runs")
    path = files / f"small_{name}"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("heading", "config", "changes", "metric"),
    [
        pytest.param("Math with a verifier", "math.yaml", {}, "reward/math", marks=pytest.mark.long),
        ("Code in the sandbox", "code.yaml", {}, "reward/code"),
        pytest.param("LoRA on one GPU", "adapter.yaml", {}, "reward/math", marks=pytest.mark.long),
        pytest.param("Distillation", "distill.yaml", {}, "kl/learner_teacher", marks=pytest.mark.long),
        ("Tools", "tools.yaml", {"environment": {"max_tokens": 64}}, "episode/turns"),
    ],
)
def test_a_recipe_trains(
    heading: str, config: str, changes: dict[str, Any], metric: str, cluster: dict[str, str], files: Path
) -> None:
    assert f"hpc-grpo train {config}" in recipe(heading)
    (values,) = metrics_of(complete_in_cluster(cluster, small(files, config, **changes))).values()
    assert metric in values, sorted(values)


@pytest.mark.long
def test_a_judge_elsewhere_scores(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "t0ken-of-sixteen-characters")
    port = free_port()
    config = small(files, "judged.yaml")
    config.write_text(config.read_text().replace("http://judge01:8200", f"http://127.0.0.1:{port}"))
    server = start_server(port, "polite.py:score")
    try:
        run = run_to_end(config).run_dir
    finally:
        server.terminate()
        server.wait()
    (values,) = metrics_of(run).values()
    assert values["reward/invalid_fraction"] == 0.0


@pytest.mark.long
def test_grpo_begins_where_sft_has_ended(cluster: dict[str, str], files: Path) -> None:
    warm = complete_in_cluster(cluster, small(files, "warm.yaml"))
    assert warm.latest_export() == files / "runs" / "warm" / "export" / "step_1"
    assert metrics_of(complete_in_cluster(cluster, small(files, "refined.yaml")))


@pytest.mark.long
def test_a_run_goes_on_with_more_engines(cluster: dict[str, str], files: Path) -> None:
    complete_in_cluster(cluster, small(files, "longer.yaml"))
    again = complete_in_cluster(
        cluster, small(files, "longer.yaml", train={"total_steps": 2}, engine={"engines_per_node": 2})
    )
    assert list(metrics_of(again)) == [1, 2]
    (line,) = [line for line in recipe("A fork").splitlines() if line.startswith("hpc-grpo fork")]
    words = shlex.split(line.replace("--step 50", "--step 1"))[1:]
    assert call(*words).exit_code == 0
    forked = complete_in_cluster(cluster, files / "runs" / "faster" / "config.yaml")
    assert {step: values["lr"] for step, values in metrics_of(forked).items()} == {1: 1e-6, 2: 2e-6}


@pytest.mark.long
def test_the_cells_of_a_sweep_train(cluster: dict[str, str], files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each learning rate, without a queue's jobs."""
    queue = FakeQueue()
    monkeypatch.setattr("hpc_grpo.cli.submit.job_queue", lambda: queue)
    config, *words = [shlex.split(line)[2:] for line in recipe("A sweep").splitlines() if "--seeds 3 --gpus 4" in line][
        1
    ]
    done = call("submit", str(small(files, config)), *words)
    assert done.exit_code == 0, done.output
    cells = files / "runs" / "swept"
    for name in ("lr-1e-06_seed-0", "lr-2e-06_seed-2"):
        config = shutil.copy(cells / name / "config.yaml", files / f"{name}.yaml")  # paths are relative to its folder
        complete_in_cluster(cluster, config)
    rows = [line.split() for line in call("compare", str(cells)).output.splitlines()[1:3]]
    assert [row[:3] for row in rows] == [[f"train.lr={lr}", "1/3", "0-1"] for lr in ("1e-06", "2e-06")]


def test_a_config_of_trl_trains(cluster: dict[str, str], files: Path) -> None:
    (line,) = [line for line in recipe("Moving from TRL").splitlines() if line.startswith("hpc-grpo config")]
    assert call(*shlex.split(line)[1:]).exit_code == 0
    moved = complete_in_cluster(cluster, small(files, "moved.yaml", loss={}))
    (values,) = metrics_of(moved).values()
    assert values["reward/mean"] < 0
