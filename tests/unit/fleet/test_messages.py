"""Lines between controller and VM, and a row as words: none of it is ever a shell's, a path or an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.errors import ConfigError
from hpc_grpo.fleet.messages import (
    AttemptKey,
    AttemptSeen,
    GpuSeen,
    Observation,
    Orders,
    Outcome,
    decode_orders,
    encode,
    file_name,
    reader,
)
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.spec import config_text, make_spec
from hpc_grpo.fleet.states import Ending

HOSTILE = (
    "; rm -rf ~",
    "$(reboot)",
    "`id`",
    "../../etc/passwd",
    "--help",
    "a b\nc",
    "..",
    ".",
    "",
    "ü/…",
    "x" * 300,
    "~",
)
KEY = AttemptKey("; rm\n'\"", 3)


def row(**values: Any) -> dict[str, Any]:
    empty = dict.fromkeys(
        ("config_name", "config", "model", "dataset", "reward_function", "output_dir", "preprocessing"), ""
    )
    return {"job_id": "j", "attempt": 1, "overrides": "[]", "max_steps": 0, "use_unsloth": 0, **empty, **values}


def test_messages_come_back_as_they_were_sent() -> None:
    attempt = AttemptSeen(KEY, (0,), Ending("exit", 75, "w", 4), 9, b"\xff\n")
    seen = Observation((GpuSeen(0, "GPU-0", 80, 3, 1),), (attempt,), "")
    assert reader(Observation)(encode(seen)) == seen
    assert json.loads(encode(seen))["attempts"][0]["log"] == "/wo="  # as base64.b64decode reads it
    orders = Orders((KEY,), (KEY,), (KEY,), (KEY,), ({"job_id": "a"},))
    assert decode_orders(encode(orders)) == orders
    outcome = Outcome((KEY,), (KEY,), ((KEY, "why"),), "late")
    assert reader(Outcome)(encode(outcome)) == outcome
    assert all(encode(message).count(b"\n") == 1 for message in (seen, orders, outcome))


def test_a_jobs_file_name_is_one_name_without_meaning_and_nobody_elses() -> None:
    names = [file_name(job_id) for job_id in HOSTILE if job_id]
    assert len(set(names)) == len(names)
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-%")
        assert not name.startswith((".", "-"))
        assert len(name) < 150
    assert file_name("job123") == "job123"


@pytest.mark.parametrize("text", [text for text in HOSTILE if text])
def test_texts_of_a_row_are_one_word_each_of_the_jobs_command(text: str) -> None:
    names = ("model", "dataset", "reward_function", "preprocessing")
    spec = make_spec(row(job_id=text, output_dir=text, **dict.fromkeys(names, text)), (0,), FleetSettings())
    assert spec["words"] == ["grpo", *(f"--{name}={text}" for name in names)]
    assert spec["output_dir"] == text


def test_a_config_goes_along_whole_and_its_own_run_root_is_kept() -> None:
    config = "run: {name: mine, root: /shared/runs}\n"
    job = row(config=config, config_name="c.yaml", overrides=json.dumps(["train.lr=1e-6"]))
    spec = make_spec(job, (2, 3), FleetSettings())
    assert spec["config"] == config
    assert spec["words"] == ["train", "config.yaml", "train.lr=1e-6"]
    assert spec["run"] == {"name": "mine", "root": "/shared/runs"}
    lonely = make_spec({**job, "config": "run: {name: mine}"}, (0,), FleetSettings())
    assert lonely["run"] == {"name": "j"}  # else the jobs of one config would share a folder
    assert make_spec({**job, "overrides": '["run.name=other"]'}, (0,), FleetSettings())["run"]["name"] == "other"
    assert make_spec({**job, "config": "", "config_name": "local/tiny_grpo"}, (0,), FleetSettings())["run"] == {
        "name": "j"
    }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "neither a config nor a model"),
        ({"model": "m", "dataset": "d"}, "needs reward_function"),
        ({"config_name": "c", "overrides": "lr=3"}, "JSON list of KEY=VALUE"),
        ({"config_name": "c", "overrides": '["--driver=x"]'}, "JSON list of KEY=VALUE"),
        ({"config_name": "c", "overrides": '["run.name=["]'}, "run.name: the value is not valid YAML"),
        ({"config": "a: [", "model": "m"}, "not valid YAML"),
        ({"config": "launch: {num_nodes: 2}"}, "launch.num_nodes = 2 must be 1"),
        ({"config_name": "c", "overrides": '["launch.num_nodes=4"]'}, "launch.num_nodes = 4 must be 1"),
        ({"config_name": "c", "overrides": '["launch={num_nodes: 4}"]'}, "launch.num_nodes = 4 must be 1"),
        ({"config_name": "c", "overrides": '["launch.hosts+=[b]"]'}, "launch.hosts = .* must be empty"),
        ({"config_name": "isambard/grpo_7b_rlzero_general"}, "launch.num_nodes = [0-9]+ must be 1"),
        ({"config": "launch: {hosts: [a, b]}"}, "launch.hosts = .* must be empty"),
    ],
)
def test_a_row_that_says_nothing_to_run_is_refused_in_words(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_spec(row(**values), (0,), FleetSettings())


def test_a_config_goes_along_with_the_files_that_it_builds_on(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {num_nodes: 2, interface: hsn0}")
    (tmp_path / "mine.yaml").write_text("base: site.yaml\nrun: {name: mine}\n")
    text = config_text(tmp_path / "mine.yaml")
    assert yaml.safe_load(text) == {"run": {"name": "mine"}, "launch": {"num_nodes": 2, "interface": "hsn0"}}
    with pytest.raises(ConfigError, match=r"launch.num_nodes = 2 must be 1"):
        make_spec(row(config=text), (0,), FleetSettings())
    (tmp_path / "alone.yaml").write_text("# as it is\nrun: {name: mine}\n")
    assert config_text(tmp_path / "alone.yaml") == "# as it is\nrun: {name: mine}\n"


def test_a_path_of_a_vm_is_no_file_of_the_controllers(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {num_nodes: 2}")
    job = row(config_name=str(tmp_path / "site.yaml"))
    assert make_spec(job, (0,), FleetSettings())["words"] == ["train", str(tmp_path / "site.yaml")]


def test_an_override_takes_a_config_of_several_nodes_to_one() -> None:
    job = row(config="launch: {num_nodes: 2}", overrides='["launch.num_nodes=1"]')
    assert make_spec(job, (0,), FleetSettings())["words"] == ["train", "config.yaml", "launch.num_nodes=1"]
