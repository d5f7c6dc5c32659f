"""The driver, but its engines compute as on a CPU with AMX: vLLM's kernels for small layers, and biases in float32.

vLLM has these kernels in its build for AVX-512; on an older CPU the engines compute as they do otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine


class AmxEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        import torch
        from vllm.model_executor.layers import utils

        def is_taken(rows: int, columns: int, dtype: Any) -> bool:
            """Judge by dtype and size alone: without AMX the same kernels run, slower."""
            has_kernels = hasattr(torch.ops._C, "convert_weight_packed")
            return has_kernels and dtype == torch.bfloat16 and columns % 32 == 0 and rows % 16 == 0

        utils.check_cpu_sgl_kernel = is_taken
        super().__init__(config, *args, **options)


if __name__ == "__main__":
    workers.Engine = AmxEngine
    sys.exit(train.main())
