"""MoE routers in float32, replay of the experts that engines chose, and the load-balancing loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpc_grpo.learner.packing import PackedBatch
from hpc_grpo.learner.sequence import SequenceGroup
from hpc_grpo.weights.contract import MIXTURES


class Routers:
    """Holds the routers of all layers, and inside `recorded` also the logits of a pass."""

    def __init__(self, language_model: Any) -> None:
        """Make each router compute in float32, and use the experts that it is given.

        The decoder's argument `routed_experts` `[T, layers, k]` has them. Models whose type is not in MIXTURES do not
        change.
        """
        self.modules: list[Any] = []
        self._logits: list[Tensor] | None = None
        if language_model.config.model_type not in MIXTURES:
            return
        for number, layer in enumerate(language_model.base_model.layers):
            for router in (own for own in layer.modules() if type(own).__name__.endswith("Router")):
                self.modules.append(router)
                router.forward, router.replayed = partial(route, router), None
                router.register_forward_hook(self._keep)
                layer.register_forward_pre_hook(partial(_replay, router, number), with_kwargs=True)

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yield a list that gets the logits `[T, E]` of each layer computed in the block.

        Gradient checkpointing recomputes layers after the block, so recomputed logits are not added.
        """
        self._logits = []
        try:
            yield self._logits
        finally:
            self._logits = None

    def _keep(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._logits is not None:
            self._logits.append(output[0])

    def balance(self, logits: list[Tensor], batch: PackedBatch, group: SequenceGroup | None) -> Tensor:
        """Return the balancing loss of each target's sequence `[C]`, with gradient. An even load of top k gives k.

        The loss is E * sum over experts of f * P. f is how often a token chose the expert, P the expert's probability.
        Both are means over the sequence's tokens and all layers. This is `load_balancing_loss_func` of transformers
        (modeling_mixtral.py; arXiv:2101.03961, eq. 4 to 6) for a batch of only this sequence, so it does not depend on
        packing, shared prompts or other ranks.
        """
        num_documents, device = len(batch.document_lengths), batch.input_ids.device
        lengths = torch.tensor(batch.document_lengths, device=device)
        document_of = torch.arange(num_documents, device=device).repeat_interleave(lengths)
        if group is not None:
            document_of = group.own_tokens(document_of, filler=num_documents + 1)
        # Columns: each document, then an empty document (no prompt), then padding.
        sums = logits[0].new_zeros(2, num_documents + 2, logits[0].shape[-1])
        for layer in logits:
            probabilities = layer.softmax(dim=-1)
            chosen = probabilities.detach().topk(self.modules[0].top_k).indices
            choices = torch.zeros_like(probabilities).scatter(1, chosen, 1.0)
            sums = sums.index_add(1, document_of, torch.stack([choices, probabilities]))
        if group is not None:
            sums = group.sum(sums)
        own = [document for document in range(num_documents) if document not in {*batch.prompts}]
        before = [num_documents if (prompt := batch.prompts[document]) is None else prompt for document in own]
        counts = (*batch.document_lengths, 0)
        tokens = [counts[document] + counts[prompt] for document, prompt in zip(own, before, strict=True)]
        rows = len(logits) * torch.tensor(tokens, device=device).unsqueeze(1)
        choices, probabilities = (sums[:, own] + sums[:, before]) / rows
        return (sums.shape[-1] * (choices * probabilities).sum(dim=1))[batch.sequence_ids]


def _replay(router: Any, number: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give the router its layer's experts before each pass, also before gradient checkpointing computes it again."""
    experts = kwargs.get("routed_experts")
    router.replayed = None if experts is None else experts[:, number].long()
    return args, {name: value for name, value in kwargs.items() if name != "routed_experts"}


def route(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits `[T, E]`, weights `[T, k]` and experts `[T, k]`, as Mixtral's and Qwen3's routers do.

    The product is in float32 for weights of any precision: bfloat16 would turn close logits into ties. Replayed experts
    get the weights that these logits give them, so the router has a gradient.
    """
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = functional.linear(hidden.float(), router.weight.float())
    experts = logits.topk(router.top_k).indices if router.replayed is None else router.replayed
    chosen = logits.gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        return logits, chosen.softmax(dim=-1), experts
    return logits, (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp(), experts
