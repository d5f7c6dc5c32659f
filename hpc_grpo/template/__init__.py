"""Processes that import vLLM, torch and DeepSpeed while Ray starts. Ray's actors are forks of them."""
