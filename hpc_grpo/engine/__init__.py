"""The engine's process: a Ray actor that samples with vLLM and loads new weights between two steps."""
