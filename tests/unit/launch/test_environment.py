"""The allow-list lets through what training needs and nothing else, and launch.env names what the node has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig, to_yaml
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.agent.ray_command import RAY_SETTINGS, ray_environment
from hpc_grpo.launch.environment import (
    ALLOWED,
    DENIED,
    MASK,
    NODE_VALUES,
    ON_NODE,
    Variable,
    environment_report,
    expand,
    filtered,
    redacted,
    report_text,
    why,
)
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config


def test_every_entry_has_a_reason() -> None:
    for table in (ALLOWED, DENIED):
        assert all(reason.strip() for reason in table.values())


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HF_HOME", "WANDB_API_KEY", "NCCL_DEBUG", "FI_PROVIDER", "CUDA_VISIBLE_DEVICES", "CPATH"),
        *("OFI_NCCL_PROTOCOL", "UCX_TLS", "CXI_FORK_SAFE", "SLINGSHOT_VNIS", "IBV_FORK_SAFE", "PSM2_DEVICES"),
    ],
)
def test_a_variable_that_training_needs_gets_through(name: str) -> None:
    assert filtered({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "SBATCH_ACCOUNT",
        "PMI_RANK",
        "PYTHONPATH",
        "LD_PRELOAD",
        "RANK",
        "MASTER_ADDR",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_ADDRESS",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "https_proxy",
        "SOME_VARIABLE",
    ],
)
def test_a_variable_nobody_asked_for_stays_behind(name: str) -> None:
    assert filtered({name: "value"}) == {}


def test_pass_env_names_variables_and_prefixes_but_not_denied_ones() -> None:
    environ = {"MINE": "1", "APP_A": "2", "APP_B": "3", "OTHER": "4", "SLURM_JOB_ID": "5"}
    assert filtered(environ, ["MINE", "APP_*", "SLURM_JOB_ID"]) == {"MINE": "1", "APP_A": "2", "APP_B": "3"}


def test_env_is_set_on_top_with_this_nodes_variables() -> None:
    environ = {"LOCALDIR": "/local/7", "NCCL_DEBUG": "INFO"}
    env = filtered(environ, env={"TRITON_CACHE_DIR": "$LOCALDIR/triton", "NCCL_DEBUG": "WARN"})
    assert env == {"LOCALDIR": "/local/7", "NCCL_DEBUG": "WARN", "TRITON_CACHE_DIR": "/local/7/triton"}


def test_a_proxy_that_is_asked_for_spares_the_nodes() -> None:
    environ = {"https_proxy": "http://proxy:3128", "no_proxy": ".site"}
    env = filtered(environ, ["https_proxy"], nodes=["10.0.0.1"])
    assert env["https_proxy"] == "http://proxy:3128"
    assert env["no_proxy"] == env["NO_PROXY"] == ".site,localhost,127.0.0.1,10.0.0.1"


def test_expand_leaves_an_unknown_name_as_it_is() -> None:
    assert expand("${A}/$B/$C", {"A": "1", "B": "2"}) == "1/2/$C"


def test_an_unknown_variable_in_launch_env_ends_the_attempt_before_anything_trains(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    run.config.write_text(to_yaml(minimal_config(launch={"env": {"TRITON_CACHE_DIR": "$SITE_DISK/triton"}})))
    run.source.write_text(json.dumps({"working_dir": str(tmp_path)}))
    driver = tmp_path / "driver.py"
    driver.write_text("from pathlib import Path; Path('trained').touch()\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "hpc_grpo.cli", "attempt", str(run.path), "--driver", str(driver)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 78, done.stderr
    told = "launch.env.TRITON_CACHE_DIR = $SITE_DISK/triton: SITE_DISK is not set on "
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    (record,) = [json.loads(path.read_text()) for path in run.attempts.glob("*/attempt.json")]
    assert (record["exit_kind"], record["exit_code"]) == ("config", 78)
    assert record["why"].startswith(told)
    assert not list(tmp_path.rglob("trained"))


SECRET = "planted-5f3c-value"
ENVIRON = {
    "PATH": "/bin",
    "NCCL_DEBUG": "INFO",
    "WANDB_API_KEY": SECRET,
    "SLURM_JOB_ID": "7",
    "PYTHONPATH": "/old",
    "MINE": "1",
    "OTHER": "2",
    "RAY_AUTH_MODE": "none",
    "TMPDIR": "/scratch/tmp",
    "https_proxy": "http://me:hunter2@proxy:3128",
}
LAUNCH = LaunchConfig(pass_env=["MINE", "SLURM_JOB_ID"], env={"CACHE": "$PATH/cache", "LATER": "$NOT_HERE/x"})


def report(environ: dict[str, str] = ENVIRON, launch: LaunchConfig = LAUNCH) -> dict[str, Variable]:
    return {variable.name: variable for variable in environment_report(environ, launch)}


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("PATH", "passed", ALLOWED["PATH"]),
        ("NCCL_DEBUG", "passed", "GPU collectives"),
        ("MINE", "passed", "launch.pass_env"),
        ("CACHE", "set", "launch.env"),
        ("LATER", "set", "launch.env, expanded on each node"),
        ("RAY_AUTH_MODE", "set", RAY_SETTINGS["RAY_AUTH_MODE"][1]),
        ("TMPDIR", "set", NODE_VALUES["TMPDIR"]),
        ("OMP_NUM_THREADS", "set", "many processes share a node"),
        ("PYTHONPATH", "dropped", DENIED["PYTHONPATH"]),
        ("OTHER", "dropped", "not on the allow-list; launch.pass_env lets it through"),
        (
            "SLURM_JOB_ID",
            "dropped",
            "training never reads the scheduler; libraries that do think they are an MPI rank; "
            "launch.pass_env cannot let it through",
        ),
        ("https_proxy", "dropped", "nodes must not talk through a proxy; launch.pass_env lets it through"),
    ],
)
def test_every_variable_has_its_reason(name: str, outcome: str, reason: str) -> None:
    found = report()[name]
    assert (found.outcome, found.reason) == (outcome, reason)


def test_a_default_is_set_and_what_the_user_gave_is_passed_on() -> None:
    found = report()["NCCL_SOCKET_IFNAME"]
    assert (found.outcome, found.value) == ("set", ON_NODE)
    given = report({"NCCL_SOCKET_IFNAME": "ib"})["NCCL_SOCKET_IFNAME"]
    assert (given.outcome, given.value, given.reason) == ("passed", "ib", "GPU collectives")
    in_config = report(launch=LaunchConfig(env={"NCCL_SOCKET_IFNAME": "hsn"}))["NCCL_SOCKET_IFNAME"]
    assert (in_config.outcome, in_config.value, in_config.reason) == ("set", "hsn", "launch.env")


def test_a_variable_of_two_prefixes_has_the_reason_of_the_longer() -> None:
    assert why("PMIX_RANK", LaunchConfig()) == ("dropped", "MPI start-up of the srun step")
    assert why("HF_TOKEN", LaunchConfig())[0] == "passed"


@pytest.mark.parametrize(
    ("stage", "kept"),
    [(Stage(compiled="/c.tar"), {}), (Stage(weights="/m", compiled="/c.tar"), {"stage": {"model": True}})],
    ids=["of what is compiled", "of the weights too"],
)
def test_the_report_agrees_with_what_ray_gets(stage: Stage, kept: dict[str, Any]) -> None:
    environ = {**ENVIRON, "OMP_PROC_BIND": "close", "GLOO_SOCKET_IFNAME": "eth9", "NOT_HERE": "/on/nodes"}
    launch = LaunchConfig(pass_env=LAUNCH.pass_env, env=LAUNCH.env, **kept)
    node = ("n", "t", "", "/token", "/log", "/w", None, True, None, 1.0, launch.env, launch.pass_env)
    spec = NodeSpec(*node, templates_of="/run", stage=stage)
    real = ray_environment(environ, spec, "10.0.0.1", "hsn0")
    listed = report(environ, launch)
    assert {name for name, variable in listed.items() if variable.outcome != "dropped"} == set(real)
    assert set(listed) == {*environ, *real}
    for name, variable in listed.items():
        if variable.outcome == "passed" and not variable.is_secret:
            assert variable.value == real[name] == environ[name]


def test_a_proxy_that_is_asked_for_is_reported_with_what_it_spares() -> None:
    listed = report(launch=LaunchConfig(pass_env=["https_proxy"]))
    assert listed["https_proxy"].value == f"http://{MASK}@proxy:3128"
    assert listed["no_proxy"].outcome == "set"
    assert listed["no_proxy"].value == "localhost,127.0.0.1,(names and network of the run's nodes)"
    assert "no_proxy" in filtered(ENVIRON, ["https_proxy"])


def test_secrets_are_named_and_never_shown() -> None:
    launch = LaunchConfig(env={"COPY": "key=$WANDB_API_KEY", "OWN_TOKEN": "another-secret"}, pass_env=["DB_PASSWORD"])
    environ = {**ENVIRON, "DB_PASSWORD": "pw", "WANDB_NAME": SECRET, "UNKNOWN_SECRET": "never-either"}
    listed = report(environ, launch)
    assert listed["COPY"].value == f"key={MASK}"
    assert listed["WANDB_NAME"].value == MASK
    assert listed["DB_PASSWORD"].value == listed["OWN_TOKEN"].value == MASK
    assert "must not hold secrets" in listed["OWN_TOKEN"].reason
    text = report_text(list(listed.values()))
    for value in (SECRET, "another-secret", "never-either", "hunter2"):
        assert value not in text
        assert value not in str(listed)
    assert "UNKNOWN_SECRET (secret)" in text
    assert "WANDB_API_KEY=********" in text


def test_a_short_secret_masks_its_equals_alone() -> None:
    assert redacted("A", "1", ["1"]) == MASK
    assert redacted("A", "10", ["1", ""]) == "10"


def test_a_secret_cut_off_by_the_width_is_masked_before() -> None:
    (line,) = [
        line
        for line in report_text(
            list(report({"WANDB_NOTES": "x" * 40 + SECRET, "WANDB_API_KEY": SECRET}).values())
        ).splitlines()
        if "WANDB_NOTES" in line
    ]
    assert "planted" not in line


def test_a_variable_that_engines_set_for_themselves_says_so() -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    (found,) = [
        variable
        for variable in environment_report(environ, LaunchConfig(), {"VLLM_LOGGING_LEVEL": "ERROR"})
        if variable.name == "VLLM_LOGGING_LEVEL"
    ]
    assert found.reason == "engine settings; engines set ERROR for themselves"


def test_control_characters_and_broken_bytes_do_not_reach_the_terminal() -> None:
    text = report_text(environment_report({"HF_X": "a\x1b[31m\nb\udcff", "BAD\x1bNAME": "1"}, LaunchConfig()))
    assert "HF_X=a?[31m?b?" in text
    text.encode()
