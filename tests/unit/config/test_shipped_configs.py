from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpc_grpo.cli.request import load_request
from hpc_grpo.config import LaunchConfig
from hpc_grpo.config.load import CONFIGS_DIR, read_layers
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.launch.place.slurm.sbatch import render
from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import GH200
from hpc_grpo.plan.model import family_model
from hpc_grpo.preflight.inputs import refuse_too_few_gpus
from hpc_grpo.run.compiled import CACHES
from hpc_grpo.run.paths import RunDir
from hpc_grpo.simulate.assumed import longest_step
from hpc_grpo.simulate.placement import layout, ranked_splits

SITES = sorted(CONFIGS_DIR.rglob("site.yaml"))
RUNS = sorted({*CONFIGS_DIR.rglob("*.yaml"), *CONFIGS_DIR.rglob("*.sh")} - {*SITES, *CONFIGS_DIR.rglob("setup_*.sh")})


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_loads_and_gives_a_job_script(path: Path) -> None:
    config = load_request(str(path), []).config
    run = RunDir(config.run_path)
    script = render(JobRequest(run, config.launch, attempt_command(run)))
    assert script.startswith("#!/bin/bash\n")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_asks_for_the_gpus_that_it_reserves(path: Path) -> None:
    refuse_too_few_gpus(load_request(str(path), []).config)


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.parent.name)
def test_a_site_is_launch_settings_and_the_folder_of_runs_alone(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    assert list(values) == ["run", "launch"]
    assert list(values["run"]) == ["root"]
    LaunchConfig.model_validate(values["launch"])


def test_the_7b_config_has_the_split_that_plan_recommends_and_one_that_long_completions_do_not_slow_down() -> None:
    config = load_request("isambard/grpo_7b_rlzero_general", []).config
    plan = make_plan(family_model("7B"), config, config.launch.num_nodes, GH200)
    splits = ranked_splits(plan)
    own_s, *others_s = (max(longest_step(each) or ()) for each in (plan, *(s.plan for s in splits)))
    assert layout(splits[0].plan) == layout(plan)
    assert own_s < 1.05 * min(others_s)


@pytest.mark.parametrize("path", [path for path in RUNS if path.suffix == ".yaml"], ids=lambda path: path.stem)
def test_no_config_sets_a_clip_range_that_one_minibatch_never_reaches(path: Path) -> None:
    values = read_layers(path)
    clips = {key for key in values.get("loss", {}) if key.startswith("clip")}
    assert not clips or values["train"].get("num_minibatches", 1) > 1


def test_isambard_runs_use_the_site_and_all_gpus_of_its_nodes() -> None:
    for name in ("grpo_debug_single_node", "grpo_7b_rlzero_general"):
        config = load_request(f"isambard/{name}.sh", []).config
        assert config.launch.interface == "hsn0"
        assert config.launch.slurm.gpus_per_node == 4
        assert config.placement.learners_per_node + config.engine.engines_per_node == 4
    assert load_request("isambard/grpo_debug_single_node.sh", []).config.train.total_episodes == 100
    assert load_request("isambard/grpo_7b_rlzero_general.sh", []).config.launch.slurm.max_job_chains == 10


def test_isambard_jobs_begin_with_what_engines_have_compiled_before() -> None:
    """A cache that launch.env puts elsewhere is not kept: each job would compile for minutes."""
    launch = load_request("isambard/grpo_debug_single_node", []).config.launch
    assert launch.env.keys().isdisjoint(CACHES)


def test_isambard_jobs_load_a_compiler_and_leave_the_networks_settings_to_the_module_of_nccl() -> None:
    """The site's page: brics/nccl brings aws-ofi-nccl and the other NCCL_* and FI_* variables."""
    launch = load_request("isambard/grpo_debug_single_node", []).config.launch
    assert launch.modules == ["brics/nccl", "cudatoolkit", "gcc-native"]
    own = {name: value for name, value in launch.env.items() if name.startswith(("NCCL_", "FI_"))}
    assert own == {"NCCL_NET": "AWS Libfabric", "NCCL_SOCKET_IFNAME": "hsn", "FI_CXI_RX_MATCH_MODE": "software"}


def test_isambard_runs_are_on_scratch_where_checkpoints_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCHDIR", "/scratch/me")
    for name in ("grpo_debug_single_node", "grpo_7b_rlzero_general"):
        assert load_request(f"isambard/{name}", []).config.run_path == Path("/scratch/me/hpc-grpo") / name
    monkeypatch.delenv("SCRATCHDIR")
    with pytest.raises(ConfigError, match=r"run.root = '\$SCRATCHDIR/hpc-grpo': SCRATCHDIR is not set here"):
        load_request("isambard/grpo_debug_single_node", [])
    assert load_request("isambard/grpo_debug_single_node", ["run.root=/r"]).config.run.root == Path("/r")


def test_a_yaml_and_its_shell_twin_agree() -> None:
    for shell in CONFIGS_DIR.rglob("*.sh"):
        if (twin := shell.with_suffix(".yaml")).exists():
            assert load_request(str(shell), []).config.model == load_request(str(twin), []).config.model
