from __future__ import annotations

import pytest

from hpc_grpo.launch.environment.rules import (
    ALLOWED,
    ALLOWED_PREFIXES,
    DENIED,
    DENIED_PREFIXES,
    expand,
    filtered,
    is_secret,
)


def test_every_entry_has_a_reason() -> None:
    for table in (ALLOWED, ALLOWED_PREFIXES, DENIED, DENIED_PREFIXES):
        assert all(reason.strip() for reason in table.values())


@pytest.mark.parametrize(
    "name", ["PATH", "HF_HOME", "WANDB_API_KEY", "NCCL_DEBUG", "FI_PROVIDER", "CUDA_VISIBLE_DEVICES"]
)
def test_what_training_needs_gets_through(name: str) -> None:
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
        "RAY_ADDRESS",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "https_proxy",
        "SOME_VARIABLE",
    ],
)
def test_everything_else_stays_behind(name: str) -> None:
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


def test_expand_leaves_unknown_names() -> None:
    assert expand("${A}/$B/$C", {"A": "1", "B": "2"}) == "1/2/$C"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("WANDB_API_KEY", True),
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MONKEY", False),
        ("NCCL_NET", False),
    ],
)
def test_secrets_are_known_by_their_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret
