"""Training on two nodes of a real Slurm: to COMPLETE, and to the same weights as one learner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpc_grpo.config.load import load_resolved
from hpc_grpo.launch.agent.protocol import Stage
from hpc_grpo.launch.agent.stage import staged, version_of
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.test_foreign_configs import SMALL
from tests.integration.training_runs import (
    exported_weights,
    metrics_of,
    run_to_end,
    small_environment,
    tiny_config,
    write_workspace,
)

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
SBATCH = str(REPOSITORY / "sbatch" / "grpo_rlzero.sbatch")
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
NUM_STEPS = 5
DEADLINE_S = 420.0
SAME_TO_ROUNDING = {"rtol": 1e-4, "atol": 2e-6}
"""fp32 sums in another order, over five optimizer steps."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def one_learner(workspace: Path) -> RunDir:
    """The same training on one node: one learner, two engines."""
    return run_to_end(config_of(workspace, "one-learner", zero_stage=2, engines_per_node=2)).run_dir


def config_of(workspace: Path, name: str, zero_stage: int, engines_per_node: int, **launch: Any) -> Path:
    return tiny_config(
        workspace,
        name,
        train={"total_steps": NUM_STEPS, "lr": 1e-3, "zero_stage": zero_stage},
        engine={"engines_per_node": engines_per_node},
        checkpoint={"every": None},
        launch={"slurm": {"gpus_per_node": 4, "cpus_per_node": 4, "time_min": 10}, **launch},
    )


def assert_same_training(run: RunDir, reference: RunDir) -> None:
    assert run.is_complete()
    assert check_ledger(run).is_sound
    expected, found = metrics_of(reference), metrics_of(run)
    assert list(found) == list(expected) == list(range(1, NUM_STEPS + 1))
    for step, values in found.items():
        for name in ("loss/policy", "reward/mean", "grad_norm", "policy/entropy"):
            assert values[name] == pytest.approx(expected[step][name], rel=1e-3, abs=1e-6), (step, name)
        assert values["mismatch/logprob_abs_diff_max"] <= 1e-4
    weights, ours = exported_weights(reference), exported_weights(run)
    assert weights.keys() == ours.keys()
    largest = max(float(np.abs(weights[name] - ours[name]).max()) for name in weights)
    print(f"{run.path.name}: weights after {NUM_STEPS} steps differ by at most {largest:.1e}")
    for name in weights:
        np.testing.assert_allclose(ours[name], weights[name], **SAME_TO_ROUNDING, err_msg=name)


def output_of(folder: Path, pattern: str) -> str:
    (path,) = folder.glob(pattern)
    print(path.read_text())
    return path.read_text()


def test_sbatch_of_a_shell_config_with_zero_2_from_copies_on_the_nodes(
    slurm_cluster: SlurmCluster, workspace: Path, one_learner: RunDir, tmp_path: Path
) -> None:
    environment = small_environment(tmp_path / "environment", tmp_path / "traces")
    image = tmp_path / "environment.squashfs"
    subprocess.run(["mksquashfs", str(environment), str(image), "-quiet"], check=True)
    stage = {"environment": str(image), "model": True}
    config_of(workspace, "zero2", zero_stage=2, engines_per_node=1, stage=stage)
    shell_config = workspace / "zero2.sh"
    shell_config.write_text("TRAINING_ARGS=(zero2.yaml)\n")
    argv: list[str] = ["sbatch", "--parsable", "--nodes=2", "--time=10", SBATCH, str(shell_config)]
    done = slurm_cluster.run(argv, environment=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    end = slurm_cluster.wait_for_job(int(done.stdout), DEADLINE_S)
    log = output_of(tmp_path, "*.out")
    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), log
    assert "Ray ready on 2 nodes, 8 GPUs" in log
    assert_same_training(RunDir(workspace / "runs" / "zero2"), one_learner)
    weights = workspace / "tied"
    copies = staged(Stage(str(image), str(weights), version=version_of(image, weights)), Path("/tmp"))
    traces = [set(path.read_text().split()) for path in (tmp_path / "traces").iterdir()]
    assert traces == [{str(copies["environment"])}] * 2, "on each node, and from nowhere else"


@pytest.mark.long
def test_submit_with_zero_3(slurm_cluster: SlurmCluster, workspace: Path, one_learner: RunDir) -> None:
    config = config_of(workspace, "zero3", zero_stage=3, engines_per_node=1)
    command: list[Any] = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config), "--nodes", "2"]
    command += ["--partition", "nodefmem"]
    done = slurm_cluster.run(command, environment=ENVIRONMENT, cwd=workspace)
    assert done.returncode == 0, done.stderr
    end = slurm_cluster.wait_for_job(int(done.stdout.split()[2]), DEADLINE_S)
    run = RunDir(workspace / "runs" / "zero3")
    log = output_of(run.path / "slurm", "*_log.out")
    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), log
    assert "Ray ready on 2 nodes, 8 GPUs" in log
    assert_same_training(run, one_learner)


@pytest.mark.long
def test_sbatch_of_open_instructs_options(slurm_cluster: SlurmCluster, workspace: Path) -> None:
    """As its fork for Slurm has them; the words after it put a tiny model and data in."""
    config = workspace / "config.sh"
    config.write_text(
        "EXP_NAME=oi\nexport MAX_JOB_CHAINS=0\n"
        'TRAINING_ARGS="--exp_name ${EXP_NAME} --model_name_or_path tied --chat_template_name qwen '
        "--dataset_mixer_list train.jsonl 1.0 --num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 2 "
        "--max_prompt_token_length 16 --response_length 16 --pack_length 512 --beta 0.0 --total_episodes 16 "
        '--num_learners_per_node 1 --vllm_num_engines 2 --vllm_sync_backend gloo --output_dir runs"\n'
    )
    kept = {"run.root", "run.name", "model.path", "placement.learners_per_node", "engine.engines_per_node",
            "train.total_steps", "train.total_episodes", "launch.slurm.gpus_per_node"}  # fmt: skip
    words = [f"{key}={'null' if own is None else own}" for key, own in SMALL.items() if key not in kept]
    given = ["--parsable", "--time=10", "--nodes=2", "--gpus-per-node=2"]
    argv: list[str] = ["sbatch", *given, SBATCH, str(config), *words]
    done = slurm_cluster.run(argv, environment=ENVIRONMENT, cwd=workspace)
    assert done.returncode == 0, done.stderr
    end = slurm_cluster.wait_for_job(int(done.stdout), DEADLINE_S)
    log = output_of(workspace, f"*-{int(done.stdout)}.out")
    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), log
    assert "has options of open-instruct. What is different here:" in log
    assert "Ray ready on 2 nodes, 4 GPUs" in log
    run = RunDir(workspace / "runs" / "oi")
    assert run.is_complete()
    config_of_run = load_resolved(run.config)
    assert (config_of_run.placement.learners_per_node, config_of_run.engine.engines_per_node) == (1, 1)
