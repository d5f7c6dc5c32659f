"""`hpc-grpo cluster prefetch` with the real libraries against a hub on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import tiny_config, write_workspace
from tests.stand_ins.hub import HubRepo, StandInHub

SUMS = b"".join(json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}).encode() + b"\n" for n in range(3))
CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n---\n"
TINY = ModelSize(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32, max_tokens=64)


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model repository, with files of other frameworks that training has no use for."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, TINY, seed=0)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "README.md": b"a tiny model", "pytorch_model.bin": b"x" * 999, "onnx/model.onnx": b"x" * 999}


@pytest.fixture
def hub(model_files: dict[str, bytes]) -> Iterator[StandInHub]:
    data = {"README.md": CARD, "train.jsonl": SUMS}
    repos = [
        HubRepo("models", "org/tiny", model_files),
        HubRepo("models", "org/closed", model_files, token="open-sesame"),
        HubRepo("datasets", "org/sums", data),
        HubRepo("datasets", "org/closed-sums", data, token="open-sesame"),
    ]
    with StandInHub(repos) as hub:
        yield hub


pytestmark = pytest.mark.integration

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(tmp_path: Path, hub: StandInHub) -> Call:
    """Runs `hpc-grpo cluster prefetch` on a config that names org/tiny and org/sums. The caches are below `cache`."""
    values = {
        "run": {"name": "r"},
        "model": {"path": "org/tiny", "dtype": "float32"},
        "data": {
            "train": {"path": "org/sums", "subset": "main"},
            "template": "plain",
            "max_prompt_tokens": 16,
        },
        "rollout": {"max_new_tokens": 24},
        "train": {"total_steps": 1, "max_tokens_per_microbatch": 512},
        "launch": {"env": {"HF_HOME": "$SITE_CACHE/hf", "TRITON_CACHE_DIR": "$LOCALDIR/triton"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    ours |= {"SITE_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpc_grpo.cli", "cluster", "prefetch", "run.yaml", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**ours, **environ})

    return run


def test_caches_of_the_job_are_filled_with_a_token_written_nowhere_and_verified_offline(
    call: Call, hub: StandInHub, tmp_path: Path
) -> None:
    words = ["model.path=org/closed", "data.train.path=org/closed-sums"]
    missing = call("--verify-only", *words)
    assert (missing.returncode, missing.stdout) == (78, "")
    assert "error: model.path = org/closed cannot be loaded with the network off" in missing.stderr
    assert hub.requests == []

    done = call(*words, HF_TOKEN="open-sesame")
    assert done.returncode == 0, done.stderr
    model, data = done.stdout.splitlines()
    assert model.startswith("model.path = org/closed ")
    assert data.startswith("data.train.path = org/closed-sums ")
    assert all("  verified  " in line for line in (model, data))
    snapshot = Path(model.split()[-1])
    assert snapshot.is_relative_to(tmp_path / "cache" / "hf" / "hub")
    assert Path(data.split()[-1]).is_relative_to(tmp_path / "cache" / "hf" / "datasets")
    assert not {"README.md", "pytorch_model.bin", "onnx"} & {path.name for path in snapshot.iterdir()}
    assert (snapshot / "model.safetensors").stat().st_size > 1000
    everything = done.stdout.encode() + done.stderr.encode()
    everything += b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"open-sesame" not in everything

    asked = len(hub.requests)
    weights = (snapshot / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1])
    damaged = call("--verify-only", *words)
    assert damaged.returncode == 78
    assert "is cut short or damaged" in damaged.stderr
    assert damaged.stdout.strip() == data
    assert len(hub.requests) == asked


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_what_is_gated_or_unknown_is_one_line_with_the_fix(call: Call) -> None:
    model, data = errors(call("model.path=org/closed", "data.train.path=org/closed-sums"))
    assert model.startswith("error: model.path = org/closed is gated: accept its terms")
    assert data.startswith("error: data.train.path = org/closed-sums is gated: accept its terms")
    assert "export HF_TOKEN" in model and "export HF_TOKEN" in data
    (model,) = errors(call("model.path=org/tinny"))
    assert model.startswith("error: model.path = org/tinny: the hub has none of this name")


def test_what_the_run_would_refuse_is_found_here(call: Call) -> None:
    words = ["data.train.prompt_field=prompt", "data.max_prompt_tokens=41", "data.eval.path=held_out.jsonl"]
    text = "\n".join(errors(call(*words)))
    assert "there is no field 'prompt' (prompt_field). Fields: question, answer." in text
    assert "41 + 24 = 65 exceeds the context of model.path = org/tiny: 64 tokens" in text
    assert "held_out.jsonl cannot be read" in text


def test_without_a_network_it_says_where_to_run(call: Call) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refused
        done = call(HF_ENDPOINT=f"http://127.0.0.1:{nobody.getsockname()[1]}")
    lines = errors(done)
    assert [line.split(":")[1].strip() for line in lines] == ["model.path = org/tiny", "data.train.path = org/sums"]
    assert all("no network" in line and "login node" in line for line in lines)
    assert "Retry" not in done.stderr


def test_paths_on_disk_are_verified_and_nothing_is_fetched(call: Call, hub: StandInHub, tmp_path: Path) -> None:
    write_model(tmp_path / "local", TINY, seed=0)
    (tmp_path / "sums.jsonl").write_bytes(SUMS)
    words = ["model.path=./local", "data.train.path=sums.jsonl", "data.train.subset=null"]
    done = call(*words)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["local", "sums.jsonl"]
    assert hub.requests == []


def test_a_cache_that_only_the_job_can_name_is_refused(call: Call, hub: StandInHub) -> None:
    done = call("launch.env.HF_HOME=$JOB_TMP/hf")
    assert done.returncode == 78
    assert "launch.env.HF_HOME = $JOB_TMP/hf cannot be resolved here" in done.stderr
    assert hub.requests == []


@pytest.mark.long
def test_a_run_trains_offline_on_what_was_prefetched(tmp_path: Path) -> None:
    launch = {"object_store_gib": 0.1, "env": {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}}
    config = tiny_config(write_workspace(tmp_path), "by-name", train={"total_steps": 2}, launch=launch)
    files = {path.name: path.read_bytes() for path in (tmp_path / "tied").iterdir()}
    data = {"train.jsonl": (tmp_path / "train.jsonl").read_bytes()}
    repos = [
        HubRepo("models", "org/tied", {**files, "README.md": b"not needed"}),
        HubRepo("datasets", "org/sums", data),
    ]
    words = [str(config), "model.path=org/tied", "data.train.path=org/sums"]
    with StandInHub(repos) as hub:
        environ = {**os.environ, "HF_ENDPOINT": hub.url}
        for command in ("cluster prefetch", "train"):
            asked = len(hub.requests)
            argv = [sys.executable, "-m", "hpc_grpo.cli", *command.split(), *words]
            done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=environ)
            assert done.returncode == 0, done.stdout + done.stderr
        assert len(hub.requests) == asked
    run = RunDir(tmp_path / "runs" / "by-name")
    assert run.is_complete()
    assert (run.export(2) / "tokenizer.json").read_bytes() == files["tokenizer.json"]
