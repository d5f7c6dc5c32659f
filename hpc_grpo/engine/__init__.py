"""The engine's process: a Ray actor that samples with vLLM and takes in new weights between two steps."""
