"""Real training through the fleet: two jobs at once on one VM over ssh, a config's and train_grpo.py's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from tests.integration.training_runs import tiny_config, write_workspace
from tests.places.conftest import bed_of
from tests.places.fleet_scene import fleet_on
from tools.virtual_machines.bed_layout import Shape
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

NUM_STEPS = 2
SMALL = (
    "data.train.prompt_field=question",
    "model.device=cpu",
    "model.dtype=float32",
    "rollout.max_new_tokens=16",
    "data.max_prompt_tokens=16",
    "engine.kv_cache_gib=0.0625",
    "engine.vllm.max_num_seqs=32",
    "grading.num_workers=1",
)


@pytest.fixture(scope="module")
def one_vm() -> Iterator[Bed]:
    """A VM of four GPUs, and its controller."""
    with bed_of(Shape("vms", 1)) as bed:
        yield bed


def test_a_config_and_a_command_of_train_grpo_train_at_once_on_one_vm(one_vm: Bed) -> None:
    with fleet_on(one_vm, ["vm1"], program=[], lease_s=300.0) as fleet:
        workspace = fleet.folder / "work"
        workspace.mkdir()
        write_workspace(workspace)
        parameters = write_model(workspace / "small", ModelSize(), seed=0)
        config = tiny_config(workspace, "configured", "small", train={"total_steps": NUM_STEPS})
        command = ("--model", str(workspace / "small"), "--dataset", str(workspace / "train.jsonl"))
        command = (*command, "--reward_function", "correctness", "--max_steps", str(NUM_STEPS))
        fleet.fleet("submit", "--gpus", "2", "--id", "configured", str(config))
        fleet.fleet("submit", "--gpus", "2", "--id", "seeds", *command, "--preprocessing", "generic", *SMALL)
        fleet.up()
        fleet.wait_for_all("completed", 2, 400)
        first, second = fleet.rows()["attempts"]
        assert max(first["claimed_at"], second["claimed_at"]) < min(first["ended_at"], second["ended_at"])
        assert {first["gpus"], second["gpus"]} == {"[0, 1]", "[2, 3]"}
        for run in (workspace / "runs" / "configured", fleet.folder / "on" / "vm1" / "runs" / "seeds" / "run"):
            expect_trained(run)
        print(f"{parameters:,} parameters, {fleet.fleet('job', 'configured')}\n{fleet.fleet('job', 'seeds')}")
        print(fleet.fleet("logs", "seeds", "--num", "8"))


def expect_trained(path: Path) -> None:
    """The run has done its steps, says so, and left a ledger without holes and a model."""
    run = RunDir(path)
    state, ledger = read_state(run), check_ledger(run)
    assert run.is_complete()
    assert state is not None
    assert state.step == NUM_STEPS
    assert ledger.is_sound, ledger
    assert ledger.steps == NUM_STEPS
    assert list(path.glob(f"export/step_{NUM_STEPS}/*.safetensors"))
