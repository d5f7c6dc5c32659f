from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.template.environment import learner_environment, prepare, runtime_env
from tests.support.configs import minimal_config

SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("environ", "on_gpu", "expected"),
    [
        ({}, True, SEGMENTS),
        ({}, False, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, True, {}),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, True, {}),
    ],
    ids=["GPU", "CPU", "a user's own", "a user's own by its new name"],
)
def test_a_learner_on_a_gpu_allocates_in_segments_that_grow_unless_the_user_chose(
    environ: dict[str, str], on_gpu: bool, expected: dict[str, str]
) -> None:
    variables = learner_environment(minimal_config(), environ, on_gpu=on_gpu)
    assert {name: value for name, value in variables.items() if name.endswith("ALLOC_CONF")} == expected


def test_nccl_on_a_gpu_dumps_nothing_over_our_store_unless_the_user_chose() -> None:
    def chosen(environ: dict[str, str], *, on_gpu: bool) -> str | None:
        return learner_environment(minimal_config(), environ, on_gpu=on_gpu).get("TORCH_NCCL_DUMP_ON_TIMEOUT")

    assert (chosen({}, on_gpu=True), chosen({}, on_gpu=False)) == ("0", None)
    assert chosen({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, on_gpu=True) == "1"


@pytest.mark.parametrize("kind", ["learner", "engine"])
def test_a_template_has_the_environment_of_its_actors_and_the_models_own_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    config = minimal_config(model={"path": str(tmp_path), "device": "cpu"})
    given = runtime_env(kind, config, on_gpu=False)
    assert given["py_executable"].startswith(f"${{HPC_GRPO_{kind.upper()}_PYTHON:-/")
    monkeypatch.setattr(os, "environ", environ := {"PATH": "/bin"})
    modules = prepare(kind, config)
    assert environ == {"PATH": "/bin", **given["env_vars"]}
    assert (
        modules[-1]
        == {
            "learner": "transformers.models.qwen2.modeling_qwen2",
            "engine": "vllm.model_executor.models.qwen2",
        }[kind]
    )


@pytest.mark.parametrize("kind", ["learner", "engine"])
def test_a_template_imports_none_of_our_modules_that_needs_ray(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(os, "environ", {})
    modules = [name for name in prepare(kind, minimal_config()) if name.startswith("hpc_grpo.")]
    assert modules
    program = f"import sys; sys.modules['ray'] = None; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_template_of_a_model_that_is_not_there_imports_what_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert "deepspeed" in prepare("learner", minimal_config(model={"path": str(tmp_path / "away")}))
    (tmp_path / "config.json").write_text("[]")
    assert "deepspeed" in prepare("learner", minimal_config(model={"path": str(tmp_path)}))
