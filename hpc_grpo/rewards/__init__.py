"""Rewards: the registry, built-ins, and a pool of killable worker processes that runs them.

This file imports the registry alone: it is loaded in every worker, and a killed worker's successor starts as
fast as its imports are few.
"""

from hpc_grpo.rewards.registry import reward

__all__ = ["reward"]
