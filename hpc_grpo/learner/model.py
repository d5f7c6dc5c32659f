"""The policy: a Hugging Face causal language model that maps packed microbatches to log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpc_grpo.config import Config
from hpc_grpo.config.resources import LOGPROB_CHUNK_TOKENS
from hpc_grpo.learner.attention import PACKED_SDPA, PACKED_VARLEN
from hpc_grpo.learner.head import LogprobHead
from hpc_grpo.learner.layout import document_layout, varlen_layout
from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.types import ParameterSpec


class PolicyModel(nn.Module):  # type: ignore[misc]
    """Wraps a causal language model; `forward` gives what the losses need, never logits."""

    def __init__(self, language_model: Any, config: Config) -> None:
        super().__init__()
        head, in_float32 = language_model.get_output_embeddings(), config.model.head_dtype == "float32"
        self.language_model = language_model
        language_model.set_output_embeddings(
            LogprobHead(
                head.weight,
                head.bias,
                LOGPROB_CHUNK_TOKENS,
                in_float32=in_float32,
                entropy_gradient=config.loss.entropy_coef > 0.0,
            )
        )
        # Demonstrations were sampled by nobody.
        self._temperature = config.rollout.temperature if config.needs.rollouts else 1.0
        self._dtype = getattr(torch, config.model.dtype)
        self._hf_names = frozenset(name for name, _ in language_model.named_parameters())

    def forward(self, batch: PackedBatch, **of_head: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, both `[C]` float32, at the batch's trained tokens.

        `of_head` are options of the head's own (`LogprobHead.forward`).
        Layers that work token by token see all documents as one row `[1, T]`; only attention knows borders.
        """
        backbone = self.language_model.base_model
        states = backbone(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            **self._attention_kwargs(batch),
        ).last_hidden_state
        hidden = states[0].index_select(0, batch.target_positions)
        head = self.language_model.get_output_embeddings()
        return head(hidden, batch.target_ids, self._temperature, **of_head)  # type: ignore[no-any-return]

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the loaded model's parameters under their Hugging Face names; a tied one appears once."""
        yield from (own for own in self.language_model.named_parameters() if own[0] in self._hf_names)

    def _attention_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        kernel = self.language_model.config._attn_implementation
        lengths, device = batch.document_lengths, batch.input_ids.device
        if kernel == PACKED_SDPA:
            return {"document_layout": document_layout(lengths, device, batch.prompts, self._dtype)}
        if kernel == PACKED_VARLEN:
            return {"varlen_layout": varlen_layout(lengths, device, batch.prompts)}
        borders, longest = batch.cu_seqlens, max(batch.document_lengths)
        names = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        return {**names, "max_length_q": longest, "max_length_k": longest}


def score(model: PolicyModel, batch: PackedBatch) -> Tensor:
    """Return the log-probabilities `[C]` of a microbatch, without gradient; a sign of progress."""
    with torch.no_grad():
        logprobs, _ = model(batch, with_entropy=False)
    PULSE.beat()
    return logprobs


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape without ZeRO-3's partitioning, under which `.shape` is `(0,)`."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def parameter_specs(model: PolicyModel, dtype: str) -> list[ParameterSpec]:
    """List every parameter once, in the model's order; a tied output layer is left out."""
    return [ParameterSpec(name, full_shape(p), dtype) for name, p in model.hf_named_parameters()]


@contextmanager
def gathered(model: PolicyModel, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Give full parameters by name, valid inside the `with` block only; they are the live weights, not copies.

    A module with a `merged_weight` gives that for its weight (`learner/parts/base.py`).
    Under ZeRO-3 this is a collective: every learner must enter with the same names. Raises KeyError for an
    unknown name.
    """
    parameters = dict(model.hf_named_parameters())
    chosen = {name: parameters[name] for name in names}
    merging = {name: module for name in names if (module := _merging_module(model, name)) is not None}
    needed = [*chosen.values(), *(p for module in merging.values() for p in module.parameters())]

    def full() -> dict[str, Tensor]:
        merged = {name: module.merged_weight().detach() for name, module in merging.items()}
        return {**{name: p.detach() for name, p in chosen.items()}, **merged}

    if not any(hasattr(p, "ds_id") for p in needed):
        yield full()
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(needed):
        yield full()


def _merging_module(model: PolicyModel, name: str) -> Any:
    """Return the module that publishes something else than its parameter `name`, or None."""
    path, _, attribute = name.rpartition(".")
    module = model.language_model.get_submodule(path)
    return module if attribute == "weight" and hasattr(module, "merged_weight") else None
