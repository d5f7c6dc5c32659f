"""Filling the caches a job will read, where there is a network, and proving that it needs none.

The command works out what a config names (`items.py`) and which caches the job will use (`caches.py`). A process of
its own then fetches (`fetch.py`), and another one, with the network off, loads what was fetched by the run's own code
(`verify.py`): libraries read the names of their caches when they are imported.
"""
