"""`hpc-grpo model serve` with a model's folder, asked by OpenAI's client."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI

pytestmark = pytest.mark.integration


def test_a_model_is_served_until_ctrl_c(workspace: Path) -> None:
    sets = ("data.template=plain", "data.max_prompt_tokens=32", "model.device=cpu", "engine.kv_cache_gib=0.0625")
    words = [sys.executable, "-m", "hpc_grpo.cli", "model", "serve", str(workspace / "tied"), "--max-new-tokens", "16"]
    words += [word for key in sets for word in ("--set", key)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=workspace) as process:
        try:
            assert process.stdout is not None
            told = dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
            client = OpenAI(base_url=told["OPENAI_BASE_URL"], api_key=told["OPENAI_API_KEY"], timeout=60)
            for _ in range(2):
                answer = client.chat.completions.create(model="x", messages=[{"role": "user", "content": "1+1"}])
                assert answer.usage is not None
                assert 0 < answer.usage.completion_tokens <= 16
            text = client.completions.create(model="x", prompt="1+1", logprobs=1).choices[0]
            assert text.logprobs is not None
            assert text.logprobs.token_logprobs is not None
            assert 0 < len(text.logprobs.token_logprobs) <= 16
            with pytest.raises(BadRequestError, match="maximum context length is 48 tokens"):
                client.chat.completions.create(model="x", messages=[{"role": "user", "content": "1" * 60}])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
