from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.agent.stage import make_copies, staged, staged_environment, version_of

NODE = NodeSpec("n1", "17-1-0", "", "/run/token", "/logs", "/work", None, False, None, 1.0)


def always() -> bool:
    return True


def on_node(folder: Path, stage: Stage) -> NodeSpec:
    """A node whose own disk is `local` in the folder."""
    return replace(NODE, local_dir=str(folder / "local"), stage=stage)


def environment(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    os.utime(folder / "pyvenv.cfg", (1.0, 1.0))
    return folder


def test_an_environment_is_copied_with_its_links_and_times_and_its_python_is_used(tmp_path: Path) -> None:
    stage = Stage(environment=str(environment(tmp_path / "env")))
    _, [folder] = make_copies(on_node(tmp_path, stage), {}, always)
    python = Path(staged(stage, tmp_path / "local").python)
    assert python == folder.path / "bin" / "python"
    assert python.readlink() == Path(sys.executable)
    assert (folder.path / "pyvenv.cfg").stat().st_mtime == 1.0, "else Python would compile each module anew"
    folder.leave()
    assert list((tmp_path / "local").iterdir()) == []


def test_an_environment_that_was_changed_has_another_copy(tmp_path: Path) -> None:
    source = environment(tmp_path / "env")

    def copy() -> Path | None:
        return staged(Stage(environment=str(source), version=version_of(source)), tmp_path).environment

    before = copy()
    assert before == copy()
    os.utime(source / "pyvenv.cfg", (2.0, 2.0))
    assert before != copy()


def test_of_a_model_the_weights_that_are_loaded_are_copied_without_other_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (tmp_path / "blob").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "blob")
    (snapshot / "config.json").write_text("{}")
    with (snapshot / "consolidated.00.pth").open("wb") as other:
        other.truncate(65 << 20)
    (snapshot / "original").mkdir()
    _, [folder] = make_copies(on_node(tmp_path, Stage(weights=str(snapshot))), {}, always)
    copied = {entry.name for entry in folder.path.iterdir() if not entry.name.startswith(".")}
    assert copied == {"model.safetensors", "config.json"}
    assert f"{folder.path} has its copy after " in capsys.readouterr().err
    assert not (folder.path / "model.safetensors").is_symlink()
    assert staged_environment(Stage(weights=str(snapshot)), tmp_path / "local", {}) == {
        "HPC_GRPO_WEIGHTS_DIR": str(folder.path)
    }
    folder.leave()


def test_what_is_no_environment_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    node = on_node(tmp_path, Stage(environment=str(tmp_path / "env")))
    with pytest.raises(LaunchError, match=r"launch.stage on node n1: environment = .*/env has no bin/python"):
        make_copies(node, {}, always)
    assert list((tmp_path / "local").iterdir()) == []


def test_what_the_copying_program_says_is_told(tmp_path: Path) -> None:
    node = on_node(tmp_path, Stage(weights=str(tmp_path / "model")))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "part-1.safetensors"}}')
    told = r"launch.stage on node n1: model = true: .* was not copied by cp \(exit code 1\): cp: .*part-1.safetensors.*"
    with pytest.raises(LaunchError, match=told + r"Set launch.local_dir to a folder with room"):
        make_copies(node, {}, always)
    assert list((tmp_path / "local").iterdir()) == []


def test_copying_ends_with_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "bin" / "cp"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    node = on_node(tmp_path, Stage(environment=str(environment(tmp_path / "env"))))
    spec, folders = make_copies(node, {}, lambda: False)
    assert (spec, folders) == (node, [])
    assert list((tmp_path / "local").iterdir()) == []


def test_caches_lead_to_the_nodes_own_folder_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    stage = Stage(compiled="/runs/.compiled/x.tar")
    folder = staged(stage, tmp_path).compiled
    given = {"TRITON_CACHE_DIR": "/mine"}
    assert staged_environment(stage, tmp_path, given) == {
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HPC_GRPO_COMPILED_DIR": str(folder),
        "HPC_GRPO_COMPILED_ARCHIVE": "/runs/.compiled/x.tar",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_without_a_folder_of_its_own_a_node_compiles_where_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(compiled="/runs/.compiled/x.tar")
    folder = staged(stage, tmp_path / "local").compiled
    assert folder is not None
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    spec, folders = make_copies(on_node(tmp_path, stage), {}, always)
    assert (spec.stage, folders) == (Stage(), [])
    assert "Engines compile where they like" in capsys.readouterr().err
