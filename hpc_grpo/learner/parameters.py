"""The policy's parameters as the outside sees them: Hugging Face names, full shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hpc_grpo.learner.model import PolicyModel
from hpc_grpo.types import ParameterSpec


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape without ZeRO-3's partitioning, under which `.shape` is `(0,)`."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def parameter_specs(model: PolicyModel, dtype: str) -> list[ParameterSpec]:
    """Every parameter once, in the model's order; a tied output layer is left out."""
    return [ParameterSpec(name, full_shape(p), dtype) for name, p in model.hf_named_parameters()]


@contextmanager
def gathered(model: PolicyModel, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Full parameters by name, valid inside the `with` block only; they are the live weights, not copies.

    Under ZeRO-3 this is a collective: every learner must enter with the same names. Raises KeyError for an
    unknown name.
    """
    parameters = dict(model.hf_named_parameters())
    chosen = {name: parameters[name] for name in names}
    if not any(hasattr(p, "ds_id") for p in chosen.values()):
        yield {name: p.detach() for name, p in chosen.items()}
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(chosen.values())):
        yield {name: p.detach() for name, p in chosen.items()}
