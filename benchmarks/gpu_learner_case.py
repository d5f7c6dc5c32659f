"""One measurement of `gpu_learner.py`, in a process of its own: the learner's step, or copies to and from the store.

`python benchmarks/gpu_learner_case.py CASE_AS_JSON FOLDER` prints the result as JSON; models are made in FOLDER once.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_learner_inputs import SHAPES, Case, make_config, model_flops, random_sequences, sequence_lengths

from hpc_grpo.plan.budgets import learner_budget
from hpc_grpo.plan.memory import GH200
from hpc_grpo.plan.model import Model


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Measure `case` with models in `folder`, which are made when they are missing."""
    return {"step": measure_step, "copies": measure_copies}[case.measures](case, folder)


def measure_step(case: Case, folder: Path) -> dict[str, Any]:
    """Time the learner's own `train_step`, after one for warm-up; without a GPU there are no bytes."""
    import torch

    from hpc_grpo.learner.learner import Learner
    from hpc_grpo.types import Minibatch

    begun = time.monotonic()
    learner = Learner(make_config(case, folder))
    on_gpu = learner.device.type == "cuda"
    synchronise = torch.cuda.synchronize if on_gpu else _do_nothing
    torch.backends.cuda.enable_cudnn_sdp(case.uses_cudnn)

    def train(step: int) -> tuple[float, int, float]:
        """Return seconds, tokens and FLOPs of a step."""
        lengths = sequence_lengths(case, step)
        trained = [max(lengths) if case.lengths == "padded" else length for length in lengths]
        sequences = random_sequences(case, trained)
        minibatch = Minibatch(sequences, sum(each.num_trained_tokens for each in sequences), len(sequences))
        step_begun = time.monotonic()
        learner.train_step([minibatch])
        synchronise()
        return time.monotonic() - step_begun, sum(lengths), model_flops(case, lengths)

    train(0)
    started_s = time.monotonic() - begun
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps: list[tuple[float, int, float]] = []
    while len(steps) < 3 or sum(seconds for seconds, *_ in steps) < case.least_s:
        steps.append(train(len(steps) + 1))
    seconds, tokens, flops = zip(*steps, strict=True)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "start_s": started_s,
        "step_s": seconds,
        "tokens_per_s": sum(tokens) / sum(seconds),
        "flops_per_s": sum(flops) / sum(seconds),
        **(gpu_memory(torch) if on_gpu else {}),
        **planned_memory(case, folder),
    }


def measure_copies(case: Case, folder: Path) -> dict[str, Any]:
    """Time the copies of a publish, parameter by parameter, between the device and the store of `weights/store.py`.

    Pageable is the store as it is mapped; registered is the same mapping, page-locked in place. GB/s of 10^9 bytes.
    """
    import torch

    from hpc_grpo.learner.model import load_policy, parameter_specs
    from hpc_grpo.weights.store import StoreSpec, WeightStore, bucket_layout

    config = make_config(case, folder)
    on_gpu = torch.cuda.is_available()
    model = load_policy(config, use_gradient_checkpointing=False).to("cuda" if on_gpu else "cpu")
    layout = bucket_layout(parameter_specs(model, config.model.dtype))
    weights = {name: parameter.detach() for name, parameter in model.hf_named_parameters()}
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
    result: dict[str, Any] = {"num_bytes": num_bytes, "num_parameters": len(weights)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        store = WeightStore(Path(shared), StoreSpec(layout, key=1), create=True)
    # Mapped, it needs its file no longer: a case that is stopped leaves none behind.
    pairs = [(weights[name], view) for bucket in layout.buckets for name, view in store.tensors(bucket)]
    synchronise = torch.cuda.synchronize if on_gpu else _do_nothing
    rates = _rates(pairs, num_bytes, synchronise, is_beside=False)
    result |= {f"pageable {way}": rate for way, rate in rates.items()}
    if on_gpu:
        cudart, address = torch.cuda.cudart(), pairs[0][1].data_ptr()
        # 0 is cudaSuccess; torch raises nothing by itself.
        if code := int(cudart.cudaHostRegister(address, layout.num_bytes, 0)):
            raise RuntimeError(f"cudaHostRegister of the store failed with error {code}")
        rates = _rates(pairs, num_bytes, synchronise, is_beside=True)
        result |= {f"registered {way}": rate for way, rate in rates.items()}
        cudart.cudaHostUnregister(address)
    return result


def _rates(
    pairs: Sequence[tuple[Any, Any]], num_bytes: int, synchronise: Callable[[], None], *, is_beside: bool
) -> dict[str, float]:
    """Return GB/s in both directions between the pairs (device, store); `is_beside`: in one stream, awaited at the end.

    Copies to pageable memory are waited for one by one, as a publish does today.
    """
    ways = {"to store": [(view, own) for own, view in pairs], "to device": pairs}
    return {way: num_bytes / _copy_s(copies, synchronise, is_beside) / 1e9 for way, copies in ways.items()}


def _copy_s(copies: Iterable[tuple[Any, Any]], synchronise: Callable[[], None], is_beside: bool) -> float:
    """Return the median of five rounds, after one for warm-up."""
    seconds = []
    for _ in range(6):
        begun = time.monotonic()
        for target, source in copies:
            target.copy_(source, non_blocking=is_beside)
        synchronise()
        seconds.append(time.monotonic() - begun)
    return statistics.median(seconds[1:])


def _do_nothing() -> None:
    """Stand in for the wait for a GPU where there is none."""


def gpu_memory(torch: Any) -> dict[str, int]:
    """Return the peaks of torch's allocator, and what else the process has taken of the GPU."""
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "beside_allocator_bytes": total - free - torch.cuda.memory_reserved(),
    }


def planned_memory(case: Case, folder: Path) -> dict[str, Any]:
    """Return `plan`'s figure for this learner: of its tensors, and of all."""
    shape = SHAPES[case.size]
    budget = learner_budget(Model(case.size, shape, shape.num_parameters, "shape"), make_config(case, folder), 1, GH200)
    parts = {part.name: part.num_bytes for part in budget.parts}
    return {"planned_bytes": budget.num_bytes, "planned_parts": parts}


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])), Path(sys.argv[2]))))
