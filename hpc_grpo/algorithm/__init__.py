"""The algorithm as pure functions: advantages, losses, KL, importance correction and packing."""
