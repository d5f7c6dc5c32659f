"""Data: items from files or the hub, prompts as token ids, and streams that map ordinals to prompts."""
