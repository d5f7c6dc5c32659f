"""Prefetch: fill the caches that a job will read, where there is a network, and prove that the job needs none.

`items` lists what a config names; `command` starts the two processes of `worker` in the environment of the job's
caches: one fetches, and one, with the network off, loads what was fetched with the run's own code (`verify`).
"""
