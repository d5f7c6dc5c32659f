"""Start an engine over two processes, and print what each of its processes listens on: `... FOLDER` as JSON.

{process title: [address, ...]} of TCP, the kinds of paths of Unix sockets, and who may open what is in shared memory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.engine.vllm import engine_environment, start_vllm
from tests.support.configs import minimal_config

_SIZE = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=96, max_tokens=1024)


def main() -> None:
    folder = Path(sys.argv[1])
    write_model(folder, _SIZE, seed=0)
    engine = {"tensor_parallel": 2, "kv_cache_gib": 0.0625, "vllm": {"max_num_seqs": 8}}
    config = minimal_config(model={"path": str(folder), "dtype": "float32", "device": "cpu"}, engine=engine)
    os.environ.update(engine_environment(config, on_gpu=False))
    before = set(Path("/dev/shm").iterdir())
    running = start_vllm(config, on_gpu=False)
    import psutil

    own = psutil.Process()
    tcp, unix = {}, set()
    for process in [own, *own.children(recursive=True)]:
        title = process.cmdline()[0].strip()
        listening = [entry for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
        tcp[title] = [entry.laddr.ip for entry in listening]
        unix |= {str(Path(entry.laddr).parent) for entry in process.net_connections("unix") if entry.laddr}
    new = set(Path("/dev/shm").iterdir()) - before
    mine = {path.name for path in new if path.name.startswith(("psm_", "sem.mp-", "vllm_dist_"))}
    modes = sorted({f"{(Path('/dev/shm') / name).stat().st_mode & 0o777:o}" for name in mine})
    print(json.dumps({"tcp": tcp, "unix": sorted(unix), "modes": modes}), flush=True)
    running.engine_core.shutdown()


if __name__ == "__main__":
    main()
