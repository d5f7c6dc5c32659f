from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.protocol import NodeSpec, OwnDisk, Stage
from hpc_grpo.launch.agent.stage import make_copies, staged, staged_environment, take_run, version_of
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE
from hpc_grpo.run.files import digest_of, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import copy_problems, copy_source, packed_source, sums_digest

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
    assert staged(stage, tmp_path / "local") == {"environment": folder.path}
    python = folder.path / "bin" / "python"
    assert python.readlink() == Path(sys.executable)
    assert (folder.path / "pyvenv.cfg").stat().st_mtime == 1.0, "else Python would compile each module anew"
    folder.leave()
    assert list((tmp_path / "local").iterdir()) == []


def test_an_environment_that_was_changed_has_another_copy(tmp_path: Path) -> None:
    source = environment(tmp_path / "env")

    def copy() -> Path:
        return staged(Stage(environment=str(source), version=version_of(source)), tmp_path)["environment"]

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
    assert f"copied to {folder.path} in " in capsys.readouterr().err
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
    folder = staged(stage, tmp_path)["compiled"]
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
    folder = staged(stage, tmp_path / "local")["compiled"]
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    spec, folders = make_copies(on_node(tmp_path, stage), {}, always)
    assert (spec.stage, folders) == (Stage(), [])
    assert "Engines compile without the cache of earlier jobs" in capsys.readouterr().err


TOKEN = "5ecret"


def spec_of(run: RunDir) -> NodeSpec:
    log_dir = run.attempts / "1-17" / "nodes" / "n2"
    spec = NodeSpec("n2", "17-1-0", "10.0.0.1:6379", str(run.secret), str(log_dir), "/gone", None, False, None, 1.0)
    return replace(spec, token_digest=digest_of(TOKEN), contract_env={ATTEMPT_DIR_VARIABLE: str(log_dir.parents[1])})


def ends() -> bool:
    raise AssertionError("it need not wait")


def test_a_node_that_sees_the_heads_token_takes_everything_as_it_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_atomic(run.secret, TOKEN)
    assert take_run(spec_of(run), tmp_path, ends) == spec_of(run)
    sent = replace(spec_of(run), own_disk=OwnDisk(str(run.path), TOKEN, "", ""))
    assert take_run(sent, tmp_path, ends) == spec_of(run)  # private is claimed, and the disk is shared


@pytest.mark.parametrize("there", [None, "the token of another Ray"])
def test_a_node_that_must_see_the_heads_disk_and_does_not_says_how_to_mend_it(
    tmp_path: Path, there: str | None
) -> None:
    run = RunDir(tmp_path / "run")
    if there:
        write_atomic(run.secret, there)
    with pytest.raises(LaunchError, match=r"node n2 does not see the head's run directory.*launch\.disks=private"):
        take_run(spec_of(run), tmp_path, lambda: True, shows_up_s=0.05)


def test_a_disk_that_shows_the_token_late_is_waited_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")

    def appears() -> bool:
        write_atomic(run.secret, TOKEN)
        return True

    assert take_run(spec_of(run), tmp_path, appears) == spec_of(run)


def test_a_node_with_its_own_disk_gets_the_runs_code_and_keeps_the_token_to_itself(tmp_path: Path) -> None:
    head, there, own_dir = RunDir(tmp_path / "head" / "run"), RunDir(tmp_path / "node" / "run"), tmp_path / "hg-17"
    reward = tmp_path / "reward.py"
    reward.write_text("def one(**_): return 1.0\n")
    digest = copy_source(head, {"reward.py": reward}, "")
    own_dir.mkdir()
    disk = OwnDisk(str(there.path), TOKEN, packed_source(head), sums_digest(head))
    sent = replace(spec_of(there), own_disk=disk, templates_of=str(there.path))
    assert NodeSpec.from_line(sent.to_line()) == sent
    spec = take_run(sent, own_dir, ends)
    assert copy_problems(there, digest) == []
    token = Path(spec.token_path)
    assert (token.read_text(), token.stat().st_mode & 0o777, token.parent) == (TOKEN, 0o600, own_dir)
    assert not there.secret.exists()
    assert Path(spec.log_dir) == own_dir / "attempt" / "nodes" / "n2"
    assert spec.contract_env[ATTEMPT_DIR_VARIABLE] == str(own_dir / "attempt")
    assert (spec.working_dir, spec.templates_of) == (str(there.path), "")
    (there.source_dir / "hpc_grpo" / "types.py").write_text("# another\n")
    take_run(replace(sent, node="n3"), own_dir, ends)
    assert copy_problems(there, digest) == []


def test_a_node_whose_own_disk_lacks_the_model_is_named_with_it_before_anything_is_put_there(tmp_path: Path) -> None:
    there, model, judge = RunDir(tmp_path / "node" / "run"), tmp_path / "model", tmp_path / "judge"
    judge.mkdir()
    needs = {"model.path": str(model), "rewards.0.args.judge": str(judge)}
    sent = replace(spec_of(there), own_disk=OwnDisk(str(there.path), TOKEN, "", "", needs))
    assert NodeSpec.from_line(sent.to_line()) == sent
    with pytest.raises(LaunchError, match=rf"The disk of node n2 lacks files.*has: model\.path = {model}\. Copy them"):
        take_run(sent, tmp_path / "hg-17", ends)
    assert not there.path.exists()
    model.mkdir()
    (tmp_path / "hg-17").mkdir()
    assert take_run(sent, tmp_path / "hg-17", ends).working_dir == str(there.path)


def test_no_secret_shows_where_a_spec_is_printed(tmp_path: Path) -> None:
    assert TOKEN not in repr(replace(spec_of(RunDir(tmp_path)), own_disk=OwnDisk("/run", TOKEN, "", "")))


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"the run uses 0\.0\.1: install that"):
        NodeSpec.from_line(replace(spec_of(RunDir(tmp_path)), version="0.0.1").to_line())
