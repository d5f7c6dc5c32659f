"""Configs of other systems: one table per system, from their keys to ours. `hpc-grpo config --from-…` reads them."""
