"""The output layer: hidden states to log-probabilities, with float32 logits for a chunk of tokens at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class _Float32Product(torch.autograd.Function):  # type: ignore[misc]
    """Multiplies `hidden` `[C, D]` by `weight` `[V, D]`, both bfloat16, into float32 logits `[C, V]`.

    A product of two bfloat16 numbers is exact in float32: only their sum is rounded, and to float32. On CUDA one kernel
    does that without float32 copies of its operands; torch has no gradient for it. vLLM calls the same one
    (`LogitsProcessor._apply_head`), and upcasts elsewhere as is done here.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # The gradients are bfloat16 anyway: float32 operands would cost a GPU fifteen times the time for them.
        hidden, weight = ctx.saved_tensors
        rounded = grad.to(weight.dtype)
        return rounded @ weight, rounded.t() @ hidden


class LogprobHead(nn.Module):  # type: ignore[misc]
    """Takes the place of a model's `lm_head` and holds its very parameters, so names and ties stay as they are.

    The loop over chunks lies inside `forward`: under ZeRO-3 the module's hooks gather the weight once per
    microbatch however many chunks there are, so ranks with different counts stay in step.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        chunk_tokens: int,
        *,
        in_float32: bool = True,
        entropy_gradient: bool = False,
    ) -> None:
        """With `in_float32`, logits are computed so whatever the parameters' precision (`model.head_dtype`).

        With `entropy_gradient` entropies carry a gradient too, for which a chunk's probabilities are kept.
        """
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._chunk_tokens = chunk_tokens
        self._in_float32 = in_float32
        self._entropy_gradient = entropy_gradient

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies, both `[C]` float32 in nats, of the tempered distribution.

        `hidden` is `[C, D]`, `targets` `[C]` int64. float32 logits exist for one chunk at a time: with several
        chunks, the backward pass computes each chunk's again. Scoring passes need no entropies, and get None.
        """
        chunks = list(zip(hidden.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            parts = [self._chunk(states, ids, temperature, with_entropy) for states, ids in chunks]
        else:
            again = partial(checkpoint, self._chunk, use_reentrant=False, preserve_rng_state=False)
            parts = [again(states, ids, temperature, with_entropy) for states, ids in chunks]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None

    def _chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._logits(hidden)
        if temperature != 1.0:
            logits = logits / temperature
        log_normalizer = logits.logsumexp(dim=-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
        if not with_entropy:
            return logprobs, None
        # Last, so that the recomputation in backward stops before it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._entropy_gradient):
            # Computed from normalised values: log_normalizer - sum(p * logits) would cancel where entropy is small.
            all_logprobs = logits - log_normalizer.unsqueeze(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        return logprobs, entropy

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self._in_float32 or hidden.dtype == torch.float32:
            return functional.linear(hidden, self.weight, self.bias).float()
        logits = _Float32Product.apply(hidden, self.weight)
        return logits if self.bias is None else logits + self.bias.float()
