"""The kernel by itself; test_model compares its values with the plain model's."""

from __future__ import annotations

import pytest
import torch

from hpc_grpo.learner.attention import document_layout, packed_sdpa


def test_kernel_refuses_what_it_does_not_compute() -> None:
    heads = torch.randn(1, 2, 6, 8)
    layout = document_layout((2, 4), "cpu")
    for options, message in (
        ({"attention_mask": torch.zeros(1)}, "an attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"sliding_window": 3}, "a sliding window of 3 tokens"),
        ({"softcap": 30.0}, "softcap"),
    ):
        arguments = {"attention_mask": None, "document_layout": layout, **options}
        with pytest.raises(ValueError, match=message):
            packed_sdpa(None, heads, heads, heads, **arguments)
    packed_sdpa(None, heads, heads, heads, None, sliding_window=4, document_layout=layout)
