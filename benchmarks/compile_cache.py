"""Start an engine that compiles, as on GPUs: with an empty cache, from an archive, and from one at another path.

`python benchmarks/compile_cache.py FOLDER`. vLLM's compiler runs on CPU when it is not told to be eager, with C++ where
a GPU has Triton; the archive, its unpacking and the keys of vLLM and Inductor are those of any device. Each start is a
process of its own; CPU seconds are those of `LLMEngine`'s start, compilers included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import print_table

from hpc_grpo.config import Config
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.engine.vllm import engine_environment, engine_options
from hpc_grpo.run.compiled import CACHES, save, unpack
from tests.support.configs import minimal_config

_SIZE = ModelSize(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=256, max_tokens=128)


def make_config(folder: Path) -> Config:
    return minimal_config(
        model={"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        data={"max_prompt_tokens": 64},
        rollout={"max_new_tokens": 64},
        engine={"kv_cache_gib": 0.0625, "vllm": {"max_num_seqs": 8}},
    )


def start(folder: Path) -> None:
    """Start the engine in this process, and print what that took."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = {**engine_options(make_config(folder), on_gpu=False), "enforce_eager": False}
    began, before = time.monotonic(), os.times()
    LLMEngine.from_engine_args(EngineArgs(**options), enable_multiprocessing=False)
    after = os.times()
    cpu_s = sum(after[:4]) - sum(before[:4])
    print(f"{cpu_s:.1f} {time.monotonic() - began:.1f}", flush=True)
    os._exit(0)  # its threads wait for nobody


def started(folder: Path, caches: Path) -> list[str]:
    """Return CPU and wall seconds of a start with its caches in a folder."""
    environ = {**os.environ, **engine_environment(make_config(folder), on_gpu=False)}
    del environ["TORCHDYNAMO_DISABLE"]
    environ |= {name: str(caches / cache) for name, cache in CACHES.items()}
    command = [sys.executable, __file__, str(folder), "start"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[-2:]


def main(folder: Path) -> None:
    write_model(folder / "model", _SIZE, seed=0)
    archive, rows = folder / "compiled.tar", []
    for case, name in (("nothing compiled", "node"), ("unpacked at the same path", "node"), ("at another", "other")):
        caches = folder / name
        caches.mkdir()
        unpack(archive, caches, os.environ)
        rows.append([case, *started(folder, caches)])
        if not archive.exists():
            save(caches, archive)
        caches.rename(folder / f"after {case}")
    size = f"archive of {archive.stat().st_size / 2**20:.1f} MiB"
    print_table(f"seconds of an engine's start, {size}", ["caches", "CPU", "wall"], rows)


if __name__ == "__main__":
    place = Path(sys.argv[1]).absolute()
    if sys.argv[2:] == ["start"]:
        start(place)
    else:
        place.mkdir(parents=True)
        main(place)
