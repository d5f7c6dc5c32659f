"""Data: items from files or the hub, prompts as token ids, and streams that are functions of an ordinal."""
