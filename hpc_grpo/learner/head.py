"""The output layer, giving log-probabilities of chosen tokens instead of logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class LogprobHead(nn.Module):  # type: ignore[misc]
    """Takes the place of a model's `lm_head` and holds its very parameters, so names and ties stay as they are.

    The loop over chunks lies inside `forward`: under ZeRO-3 the module's hooks gather the weight once per
    microbatch however many chunks there are, so ranks with different counts stay in step.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, both `[C]` float32 in nats, of the tempered distribution.

        `hidden` is `[C, D]`, `targets` `[C]` int64. float32 logits exist for one chunk at a time: with several
        chunks, the backward pass computes each chunk's again. Entropies carry no gradient.
        """
        chunks = list(zip(hidden.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            parts = [self._chunk(states, ids, temperature) for states, ids in chunks]
        else:
            parts = [
                checkpoint(self._chunk, states, ids, temperature, use_reentrant=False, preserve_rng_state=False)
                for states, ids in chunks
            ]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = functional.linear(hidden, self.weight, self.bias).float()
        if temperature != 1.0:
            logits = logits / temperature
        log_normalizer = logits.logsumexp(dim=-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
        # Last, so that the recomputation in backward stops before it.
        with torch.no_grad():
            # Of normalised values: log_normalizer - sum(p * logits) would cancel where entropy is small.
            all_logprobs = logits - log_normalizer.unsqueeze(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        return logprobs, entropy
