"""Secrets are known by their names and by their values, and are masked wherever a text is copied."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.system.secret import MASK, is_secret, secret_keys, without_secrets

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
    assert not secret_keys(without_secrets(text), "text")


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
    assert not secret_keys(value, "text")
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
    assert bool(secret_keys(line, "line")) is secret


@pytest.mark.parametrize(
    "values",
    [
        {"notify": ["env", "WANDB_API_KEY=hunter2", "notify-send"]},
        {"notify": ["env", "KEY=hunter2"]},
        {"notify": ["send", "--token", "hunter2"]},
        {"notify": ["send", "--token=hunter2"]},
        {"notify": ["curl", "-H", "Authorization: Bearer abcdef123456", "https://x.y"]},
        {"notify": ["curl", "-H", "X-Api-Key: hunter2", "https://x.y"]},
        {"notify": ["curl", "-u", "me:hunter2", "https://x.y"]},
        {"notify": ["curl", "--silent", "--user", "me:hunter2", "https://x.y"]},
        {"notify": ["curl", "https://x.y/done?api_key=hunter2"]},
        {"command": ["vllm", "serve", "m", "--api-key", "hunter2"]},
        {"command": ["vllm", "serve", "m", "--api-key=hunter2", "--port", "8000"]},
        {"command": ["sh", "-c", "vllm serve m --api-key hunter2"]},
        {"container": {"args": ["--env=HF_TOKEN=hunter2"]}},
        {"container": {"args": ["--env", "HF_TOKEN=hunter2"]}},
        {"container": {"args": ["-e", "DB_PASSWORD=hunter2"]}},
        {"slurm": {"extra": {"export": "ALL,HF_TOKEN=hunter2"}}},
        {"args": {"password": "hunter2"}},
        {"args": {"password": 12345678}},
        {"args": {"client_secret": "hunter2"}},
        {"args": {"headers": {"Authorization": "Bearer hunter2"}}},
        {"args": {"headers": {"Authorization": "hunter2"}}},
        {"args": {"headers": {"X-Api-Key": "hunter2"}}},
        {"args": {"headers": ["Authorization: Token hunter2"]}},
        {"args": {"url": "https://judge.site/score?api_key=hunter2"}},
        {"args": {"url": "https://judge.site/score?x=1&access_token=hunter2"}},
        {"args": {"judges": [{"url": "https://a.b", "api_key": "hunter2"}]}},
        {"setup_lines": ["module load cuda", "wandb login 0123456789abcdef0123456789abcdef01234567"]},
        {"setup_lines": ["wandb login --relogin local-0123456789abcdef0123456789abcdef01234567"]},
        {"setup_lines": ["huggingface-cli login --token hunter2"]},
        {"setup_lines": ["hf auth login \\", "  --token \\", "  hunter2"]},
        {"setup_lines": ["docker login -u me -p hunter2 registry.site"]},
        {"setup_lines": ["sshpass -p hunter2 ssh node"]},
        {"setup_lines": ["curl -sS -u me:hunter2 https://x.y -o data"]},
        {"setup_lines": ["export A=1 HF_TOKEN=\\", "hunter2"]},
        {"setup_lines": ["setenv WANDB_API_KEY 0123456789abcdef0123"]},
        {"setup_lines": ["echo machine h login me password 0123456789abcdef0123 >> ~/.netrc"]},
        {"setup_lines": ["aws configure set aws_secret_access_key 0123456789abcdef0123"]},
        {"notify": ["curl", "-sSu", "me:hunter2", "https://x.y"]},
        {"notify": ["curl", "-d", '{"token": "0123456789abcdef0123"}', "https://x.y"]},
        {"container": {"args": ["-eDB_PASSWORD=hunter2"]}},
        {"args": {"clientSecret": "hunter2", "note": "x"}},
        {"args": {"template": "api_key: 0123456789abcdef0123"}},
        {"env": {"MY_TOKEN": "hunter2"}},
        {"env": {"JUDGE_URL": "https://me:hunter2@judge"}},
    ],
    ids=str,
)
def test_a_secret_in_any_text_of_a_config_is_found(values: dict[str, Any]) -> None:
    (found,) = secret_keys(values)
    assert found.split(".")[0] in values


HARMLESS: list[dict[str, Any]] = [
    {"model": {"path": "/models/token-classifier"}},
    {"data": {"path": "/data/secret-santa/train.jsonl"}},
    {"data": {"path": "s3://bucket/key=2024/token=en/part.parquet"}},
    {"data": {"path": "/proj/passwords/api_keys/train.jsonl"}},
    {"rollout": {"max_tokens": 1024, "max_new_tokens": 512}},
    {"tokenizer": "org/tokenizer-v2"},
    {"args": {"api_key_env": "JUDGE_API_KEY"}},
    {"args": {"token_env": "HPC_GRPO_REWARD_TOKEN"}},
    {"args": {"token_limit": 4096, "token_budget": "16384"}},
    {"args": {"stop_token": "<|end_of_text|>", "eos_token": "END"}},
    {"args": {"answer_key": "reference_solution_2024"}},
    {"args": {"sort_key": "difficulty", "keys": ["steps", "conclusion"]}},
    {"args": {"password_field": "password"}},
    {"args": {"token_file": "/home/me/.token", "key_path": "~/.ssh/id"}},
    {"args": {"headers": {"Authorization": "Bearer $JUDGE_KEY"}}},
    {"args": {"headers": {"Content-Type": "application/json"}}},
    {"args": {"pass_k": 8, "pass_rate": "pass_rate_of_llama_8b"}},
    {"args": {"api_key": "$OPENAI_API_KEY"}},
    {"args": {"api_key": None, "password": ""}},
    {"args": {"api_key": "EMPTY"}},
    {"env": {"HF_TOKEN": "$MY_TOKEN"}},
    {"env": {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/home/me/token"}},
    {"env": {"NCCL_KEEP_ALIVE": "1", "PYTHONPATH": "/x"}},
    {"pass_env": ["WANDB_API_KEY", "HF_TOKEN", "JUDGE_*"]},
    {"notify": ["curl", "-H", "Authorization: Bearer $NTFY_TOKEN", "https://ntfy.sh/x"]},
    {"notify": ["mail", "-s", "the run's token count", "me@site.org"]},
    {"notify": ["sh", "-c", 'curl -u "me:$PASSWORD" https://x.y']},
    {"command": ["vllm", "serve", "m", "--api-key", "$JUDGE_KEY", "--max-num-batched-tokens", "8192"]},
    {"command": ["hpc-grpo", "reward", "serve", "--token-env", "HPC_GRPO_REWARD_TOKEN", "--port", "8200"]},
    {"command": ["python", "-u", "server.py:app", "--tokenizer", "org/tok", "--tokenizer-mode", "auto"]},
    {"command": ["python", "serve.py", "--stop-token", "END", "--sort-key", "difficulty"]},
    {"command": ["server", "--key", "/etc/ssl/server.key", "--password-file", "/home/me/.pw"]},
    {"container": {"args": ["--env", "HF_TOKEN", "--env=WANDB_API_KEY", "--user", "1000:1000"]}},
    {"slurm": {"extra": {"export": "ALL,HF_TOKEN", "comment": "key experiment 2024"}}},
    {"setup_lines": ["wandb login", "module load cuda/12.4"]},
    {"setup_lines": ["wandb login && wandb online"]},
    {"setup_lines": ["wandb login --host=https://wandb.site $WANDB_API_KEY"]},
    {"setup_lines": ['export HF_TOKEN="$(cat ~/.token)"', "export SSH_KEY=~/.ssh/id_cluster"]},
    {"setup_lines": ["curl -fsS https://x.y/health", "python -u check.py:main"]},
    {"setup_lines": ["hf auth login --token $HF_TOKEN", "ssh login -p 22 true"]},
    {"setup_lines": ["sort --key=2 nodes.txt", "export MAX_KEYS=16"]},
    {"system_prompt": "Every token counts. Write the key: value pairs, and the password last."},
    {"system_prompt": "Give the answer as KEY=VALUE, with a basic explanation."},
    {"system_prompt": "Authorization: none is needed. Bearer bonds pay 5% a year."},
    {"system_prompt": 'Answer as {"token": "a word of the text", "key": "reference_solution_2024"}.'},
    {"tags": ["token-level", "secret-sauce", "keys=values"]},
    {"digest": "7d19a9b4f6a3e1c2d5b8a0f9e7c6b5a4d3c2b1a0"},
]


@pytest.mark.parametrize("values", HARMLESS, ids=str)
def test_a_harmless_text_raises_no_alarm(values: dict[str, Any]) -> None:
    assert secret_keys(values) == []


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
