"""Shared by both sides of a publish: the bucket layout, the node's store, its group, and the contract on names."""
