"""Algorithms as pure functions of tensors: advantages and losses, one file for each variant."""
