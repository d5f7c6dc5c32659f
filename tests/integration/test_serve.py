"""`hpc-grpo model serve` with a folder of a model or of an adapter, asked by OpenAI's client."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from openai import BadRequestError, OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.mismatch import TOLERANCE

pytestmark = pytest.mark.integration


@contextmanager
def served(folder: Path, work_in: Path) -> Iterator[OpenAI]:
    """Serve a model inside the block, at whose end Ctrl+C must end the server."""
    sets = ("data.template=plain", "data.max_prompt_tokens=32", "model.device=cpu", "model.dtype=float32")
    words = [sys.executable, "-m", "hpc_grpo.cli", "model", "serve", str(folder), "--max-new-tokens", "16"]
    words += [word for key in (*sets, "engine.kv_cache_gib=0.0625") for word in ("--set", key)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=work_in) as process:
        try:
            assert process.stdout is not None
            told = dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
            yield OpenAI(base_url=told["OPENAI_BASE_URL"], api_key=told["OPENAI_API_KEY"], timeout=60)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_a_model_is_served_until_ctrl_c(workspace: Path) -> None:
    with served(workspace / "tied", workspace) as client:
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


def test_an_adapter_is_served_and_not_its_base(workspace: Path, tmp_path: Path) -> None:
    base, folder = AutoModelForCausalLM.from_pretrained(workspace / "tied", dtype=torch.float32), tmp_path / "adapter"
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    assert isinstance(adapted, PeftModel)
    adapted.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tied")
    prompt = tokenizer("1+1", add_special_tokens=False).input_ids
    with served(folder, workspace) as client:
        choice = client.completions.create(model="x", prompt=prompt, logprobs=1, max_tokens=1).choices[0]
    assert choice.logprobs is not None
    [token], [logprob] = tokenizer(choice.text).input_ids, choice.logprobs.token_logprobs or []

    def expected() -> float:
        with torch.no_grad():
            return float(adapted(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token])

    assert logprob == pytest.approx(expected(), abs=TOLERANCE)
    with adapted.disable_adapter():
        assert abs(expected() - logprob) > 1000 * TOLERANCE
