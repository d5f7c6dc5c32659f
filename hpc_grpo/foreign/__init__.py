"""Configs of other systems: a table a system, from their keys to ours. `hpc-grpo config --from-…` reads them."""
