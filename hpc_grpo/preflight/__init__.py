"""Preflight checks: find in a minute, before a job, what goes wrong on clusters.

`diagnosis` decides which checks run where. `login` runs on the login node. `nodes` queries `node_program` on each node;
`node_checks` and `network` judge the answers, as pure functions. `inputs` has the reasons to refuse a run.
"""
