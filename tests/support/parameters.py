"""A model's parameters in four sizes and three types, for tests of what is published."""

from hpc_grpo.types import ParameterSpec

SPECS = [
    ParameterSpec("embed", (10, 6), "float32"),
    ParameterSpec("norm", (3,), "bfloat16"),
    ParameterSpec("head", (6, 10), "float32"),
    ParameterSpec("bias", (1,), "float16"),
]
