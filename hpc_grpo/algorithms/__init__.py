"""Algorithms: what a task needs, and the losses, corrections and advantages that it is made of."""
