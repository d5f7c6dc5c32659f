"""The shapes of dense decoders with grouped-query attention and a gated MLP (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on, counted in channels, layers, heads and tokens of the vocabulary.

    `has_qkv_bias`: Qwen2, or `attention_bias`; `has_output_bias`: `attention_bias` of Llama and Qwen3;
    `has_query_key_norm`: Qwen3.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_tied_embeddings: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_query_key_norm: bool = False

    @property
    def attention_size(self) -> int:
        """Channels of all query heads together; the hidden size in most models."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer: q, k, v, o; gate, up, down; two norms; biases where the model has them."""
        d, a, k, f = self.hidden_size, self.attention_size, self.kv_size, self.intermediate_size
        matrices = d * (a + 2 * k) + a * d + 3 * d * f
        biases = self.has_qkv_bias * (a + 2 * k) + self.has_output_bias * d + self.has_mlp_bias * (2 * f + d)
        return matrices + biases + 2 * d + self.has_query_key_norm * 2 * self.head_dim

    @property
    def num_parameters(self) -> int:
        """V d (twice when the output layer is not tied) + L layers + the last norm.

        >>> FAMILY["7B"].num_parameters
        7615616512
        """
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        return embeddings + self.num_layers * self.num_layer_parameters + self.hidden_size

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest single parameter: the embedding, but for models with a tiny vocabulary."""
        widest = max(self.vocab_size, self.intermediate_size, self.attention_size)
        return widest * self.hidden_size


@dataclass(frozen=True)
class Model:
    """A shape with a parameter count, and where the count comes from, in words."""

    name: str
    shape: ModelShape
    num_parameters: int
    counted_from: str


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool = False) -> ModelShape:
    vocabulary = 151_936 if tied else 152_064
    return ModelShape(
        hidden, layers, heads, kv_heads, hidden // heads, intermediate, vocabulary, tied, has_qkv_bias=True
    )


FAMILY: dict[str, ModelShape] = {
    "0.5B": _qwen(896, 24, 14, 2, 4_864, tied=True),
    "1.5B": _qwen(1_536, 28, 12, 2, 8_960, tied=True),
    "3B": _qwen(2_048, 36, 16, 2, 11_008, tied=True),
    "7B": _qwen(3_584, 28, 28, 4, 18_944),
    "14B": _qwen(5_120, 48, 40, 8, 13_824),
    "32B": _qwen(5_120, 64, 40, 8, 27_648),
    "72B": _qwen(8_192, 80, 64, 8, 29_568),
}
"""Qwen2.5's sizes, in ascending order; from the config.json of each."""


def family_model(size: str) -> Model:
    shape = FAMILY[size]
    return Model(f"Qwen2.5-{size}", shape, shape.num_parameters, "built-in shape")
