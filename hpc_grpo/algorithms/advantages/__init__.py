"""Advantages, from the rewards of a group to a number for each token."""
