"""The learner's process: a Ray actor that computes gradients with DeepSpeed, saves them and publishes the weights."""
