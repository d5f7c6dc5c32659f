"""`hpc-grpo env` says of each variable what becomes of it and why, and shows no secret."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
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
    filtered,
    redacted,
    report_text,
    why,
)

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
        ("https_proxy", "dropped", "a proxy must not stand between the nodes; launch.pass_env lets it through"),
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
    [(Stage(), {"keep_compiled": False}), (Stage(weights="/m", compiled="/c.tar"), {"stage": {"model": True}})],
    ids=["without copies", "with copies"],
)
def test_the_report_agrees_with_what_ray_gets(stage: Stage, kept: dict[str, Any]) -> None:
    environ = {**ENVIRON, "OMP_PROC_BIND": "close", "GLOO_SOCKET_IFNAME": "eth9", "NOT_HERE": "/on/nodes"}
    launch = LaunchConfig(pass_env=LAUNCH.pass_env, env=LAUNCH.env, **kept)
    node = ("n", "t", "", "/token", "/log", "/w", None, True, None, 1.0, launch.env, launch.pass_env)
    spec = NodeSpec(*node, templates_of="/run", stage=stage)
    real = ray_environment(environ, spec, "10.0.0.1", "hsn0", "/dev/shm/x")
    listed = report(environ, launch)
    assert {name for name, variable in listed.items() if variable.outcome != "dropped"} == set(real)
    assert set(listed) == {*environ, *real}
    for name, variable in listed.items():
        if variable.outcome == "passed" and not variable.is_secret:
            assert variable.value == real[name] == environ[name]


def test_a_proxy_that_is_asked_for_spares_the_nodes() -> None:
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
