"""Data: items from files or the hub, prompts as token ids, and streams that are functions of an ordinal."""

from hpc_grpo.data.demonstrations import DemonstrationStream
from hpc_grpo.data.seeds import sampling_seed
from hpc_grpo.data.sources import load_items
from hpc_grpo.data.stream import PromptStream

__all__ = ["DemonstrationStream", "PromptStream", "load_items", "sampling_seed"]
