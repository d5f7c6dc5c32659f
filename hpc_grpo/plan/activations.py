"""Memory of a microbatch's forward and backward pass in the learner.

The way of counting is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models" (arXiv:2205.05198), section 4: what autograd keeps for the backward pass, operation by operation. The
operations are those of transformers' Llama and Qwen2 layers with a fused attention kernel (nothing of size T x T).
Letters: `T` tokens of a microbatch, `d` hidden size, `a` and `k` channels of all query and of all key heads, `H` query
heads, `f` intermediate size, `V` vocabulary, `L` layers, `b` bytes of the model's dtype, `c` tokens of a logits chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_grpo.plan.shapes import ModelShape

LOGIT_BYTES = 20
"""A chunk's logit in float32, and four more arrays of its size: normalised logits, probabilities, gradients."""


@dataclass(frozen=True)
class Activations:
    """Bytes at the peak of a backward pass. `kept` waits for it; `one_layer` and `head` come one after the other."""

    kept: int
    one_layer: int
    head: int
    kept_formula: str

    @property
    def working(self) -> int:
        return max(self.one_layer, self.head)


def layer_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """(8 + 4 b) d + b (3 a + 2 k) + 4 H + 4 b f.

    Two norms keep their float32 input (4 d each), the normalised value and their output (b d each). Attention keeps
    queries, keys, values and its output, which the output projection keeps once more, and 4 bytes a head of
    log-sum-exps. The MLP keeps gate, its activation, up and their product.
    """
    d, a, k, f, b = shape.hidden_size, shape.attention_size, shape.kv_size, shape.intermediate_size, dtype_bytes
    return (8 + 4 * b) * d + b * (3 * a + 2 * k) + 4 * shape.num_heads + 4 * b * f


def activations(
    shape: ModelShape, dtype_bytes: int, num_tokens: int, chunk_tokens: int, *, is_checkpointed: bool
) -> Activations:
    """The peak of one microbatch of `num_tokens`.

    With gradient checkpointing (Chen et al. 2016, arXiv:1604.06174) only each layer's input is kept, b d a token,
    and one layer's activations exist again while its backward pass runs, with gradients of about 2 b f beside them.
    The output layer computes logits chunk by chunk and adds two weight gradients of the chunks up.
    """
    per_layer = num_tokens * layer_bytes_per_token(shape, dtype_bytes)
    boundary = num_tokens * dtype_bytes * shape.hidden_size
    gradients = num_tokens * 2 * dtype_bytes * shape.intermediate_size
    chunk = min(chunk_tokens, num_tokens)
    head = chunk * shape.vocab_size * LOGIT_BYTES + 2 * dtype_bytes * shape.vocab_size * shape.hidden_size
    if is_checkpointed:
        return Activations(shape.num_layers * boundary, per_layer + gradients, head, "b d L T")
    return Activations(shape.num_layers * per_layer, gradients, head, "((8+4b) d + b (3a+2k) + 4H + 4b f) L T")
