"""Data: items from files or the hub, prompts as token ids, and streams that are functions of an ordinal.

This file imports nothing: `submit` reads items on a login node, which need not have numpy.
"""
