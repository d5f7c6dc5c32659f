"""Secrets are known by their names and by their values, and are masked wherever a text is copied."""

from __future__ import annotations

import pytest

from hpc_grpo.system.secret import MASK, assigns_secret, holds_secret, is_secret, without_secrets

SECRET_NAMES = """
WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD SLACK_WEBHOOK_URL DATABASE_URL PGPASS PGPASSWORD
GH_PAT DB_PASS SENTRY_DSN REDIS_URL MYSQL_PWD SSHPASS api_key GOOGLE_CREDENTIALS SESSION_COOKIE
"""
OTHER_NAMES = """
TOKENIZERS_PARALLELISM MONKEY NCCL_NET PATH PWD OLDPWD HF_TOKEN_PATH PGPASSFILE LD_LIBRARY_PATH max_new_tokens
COMPASS KEYBOARD SSL_CERT_FILE WANDB_BASE_URL PATTERN pass_k PASS_RATE pat_size
"""
VALUES = [
    "https://hooks.slack.com/services/T00/B00/abcdefghijkl",
    "http://jane:s3cret@proxy.site:3128",
    "postgresql://runs:hunter2@db/runs",
    "https://0123456789abcdef0123@git.site/repo",
    "hf_abcdefghijklmnopqrstuv",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijklmnop",
    "sk-proj-abcdefghijklmnopqrstuv",
    "sk-ant-api03-Ab1-cd2_efghijklmnopqrstuvwxyz0123456789-AA",
    "xoxb-123456789012-abcdef",
    "AKIAIOSFODNN7EXAMPLE",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blb\n-----END OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_other_names_are_none(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("value", VALUES)
def test_secrets_are_known_by_their_values(value: str) -> None:
    assert is_secret("ANYTHING", value)
    text = f"+url = '{value}'  # a line of a diff\n"
    assert MASK in without_secrets(text)
    assert not holds_secret(without_secrets(text))


@pytest.mark.parametrize(
    "value",
    [
        "http://proxy:3128",
        "https://user:$PASSWORD@proxy:3128",
        "ssh://git@host/repo",
        "git@github.com:me/repo.git",
        "7d19a9b4f6a3e1c2d5b8a0f9e7c6b5a4d3c2b1a0",
        "hf_hub_download",
        "https://huggingface.co/datasets/x",
        "-----BEGIN PUBLIC KEY-----",
        "task-specific-instructions-of-the-user",
        "org/sk-news-articles-of-slovakia-2024",
    ],
)
def test_other_values_are_none(value: str) -> None:
    assert not holds_secret(value)
    assert without_secrets(value) == value


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("export PGPASS=hunter2", True),
        ("export SLACK_WEBHOOK_URL='https://x.y/z'", True),
        ("GH_PAT=abc git pull", True),
        ("curl -H 'Authorization: Bearer hf_abcdefghijklmnopqrstuv' x", True),
        ("export https_proxy=http://u:p@proxy:1", True),
        ("export HF_TOKEN=$(cat ~/.token)", False),
        ('export HF_TOKEN="$MY_TOKEN"', False),
        ("module load cuda", False),
        ("echo TOKEN: none", False),
        ("export HF_TOKEN_PATH=/home/me/token", False),
        ("sort --key=2 nodes.txt", False),
        ("export MAX_KEYS=16", False),
        ("export HF_TOKEN=`cat ~/.token`", False),
        ("export SSH_KEY=~/.ssh/id_cluster", False),
    ],
)
def test_a_shell_line_that_writes_a_secret_out_is_known(line: str, secret: bool) -> None:
    assert assigns_secret(line) is secret


def test_a_diff_keeps_everything_but_its_secrets() -> None:
    diff = (
        "diff --git a/reward.py b/reward.py\n"
        "@@ -1 +1,4 @@\n"
        '+api_key = os.environ["MY_API_KEY"]\n'
        '+OPENAI_API_KEY = "0123456789abcdef0123456789abcdef"\n'
        "+max_new_tokens = 1024\n"
        '+headers = {"token": "c0ffee0123456789c0ffee0123456789"}\n'
    )
    kept = without_secrets(diff)
    assert "0123456789abcdef" not in kept
    assert [line for line in diff.splitlines() if line in kept.splitlines()] == [
        *diff.splitlines()[:3],
        "+max_new_tokens = 1024",
    ]
