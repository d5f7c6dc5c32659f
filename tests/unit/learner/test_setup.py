from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_grpo.config import Config
from hpc_grpo.learner.setup import ask_cuda_for_free_memory, deepspeed_config, fit_buckets, frozen_config
from tests.support.configs import minimal_config


def config(dtype: str = "float32", **train: Any) -> Config:
    return minimal_config(model={"dtype": dtype}, train=train)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_float32_learner_has_exactly_these_settings(stage: int) -> None:
    settings = deepspeed_config(config(zero_stage=stage, max_grad_norm=0.3), world_size=6)
    assert settings == {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.3,
        "steps_per_print": None,
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_a_bfloat16_learner_sums_gradients_in_float32() -> None:
    settings = deepspeed_config(config("bfloat16"), 2)
    assert settings["bf16"] == {"enabled": True}
    in_float32 = ["inv_freq", "e_score_correction_bias"]
    assert settings["data_types"] == {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": in_float32}
    assert settings["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", None),
        ("cpu", {"device": "cpu", "pin_memory": True}),
    ],
)
def test_offloading_pins_the_optimizers_memory_on_the_cpu(name: str, expected: dict[str, Any] | None) -> None:
    settings = deepspeed_config(config(zero_stage=3, offload_optimizer=name), 2)
    assert settings["zero_optimization"].get("offload_optimizer") == expected


def test_a_zero_3_reference_is_sharded_without_an_optimizer() -> None:
    settings = frozen_config(config("bfloat16"), 4)
    assert settings["zero_optimization"] == {"stage": 3}
    assert settings["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    "visible", ["GPU-3f2a9c1e-0000-1111-2222-333344445555", "MIG-3f2a9c1e-0000-1111-2222-333344445555"]
)
def test_free_memory_of_a_gpu_that_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setattr(cuda_accelerator.CUDA_Accelerator, "_init_pynvml", lambda self: None)
    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=int))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5, 10))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    accelerator = cuda_accelerator.CUDA_Accelerator()
    with pytest.raises(ValueError, match="invalid literal for int"):
        accelerator.available_memory()
    ask_cuda_for_free_memory(accelerator)
    assert accelerator.available_memory() == 5


def test_the_largest_gradient_of_zero_2_fits_into_a_bucket() -> None:
    """Otherwise DeepSpeed frees it while another stream still reduces it."""
    head = torch.empty(152_064, 3584, device="meta")  # of Qwen2.5-7B
    for stage, parameters, expected in ((2, [head], head.numel()), (2, [head[:10]], 500_000_000), (3, [head], None)):
        settings = deepspeed_config(config("bfloat16", zero_stage=stage), 2)
        fit_buckets(settings, parameters)
        assert settings["zero_optimization"].get("reduce_bucket_size") == expected
