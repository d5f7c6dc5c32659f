"""Settings of models of transformers that are made in a moment, for tests of what the learner does with a family."""

from __future__ import annotations

VOCABULARY = 50
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.2}
