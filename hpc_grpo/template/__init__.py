"""Processes that import vLLM, torch and DeepSpeed while Ray comes up; Ray's actors are forks of them."""
