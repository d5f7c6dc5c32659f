from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.protocol import NodeSpec, OwnDisk
from hpc_grpo.launch.agent.stage import attempt_dir_here, take_run
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE
from hpc_grpo.run.files import digest_of, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import copy_problems, copy_source, packed_source, sums_digest

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
    assert Path(spec.log_dir) == attempt_dir_here(own_dir) / "nodes" / "n2"
    assert spec.contract_env[ATTEMPT_DIR_VARIABLE] == str(attempt_dir_here(own_dir))
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
    with pytest.raises(LaunchError, match=rf"Node n2 has its own disk.*at: model\.path = {model}\. Copy it"):
        take_run(sent, tmp_path / "hg-17", ends)
    assert not there.path.exists()
    model.mkdir()
    (tmp_path / "hg-17").mkdir()
    assert take_run(sent, tmp_path / "hg-17", ends).working_dir == str(there.path)


def test_no_secret_shows_where_a_spec_is_printed(tmp_path: Path) -> None:
    assert TOKEN not in repr(replace(spec_of(RunDir(tmp_path)), own_disk=OwnDisk("/run", TOKEN, "", "")))


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"the run goes with 0\.0\.1: install that"):
        NodeSpec.from_line(replace(spec_of(RunDir(tmp_path)), version="0.0.1").to_line())
