"""Preflight checks: find in a minute, before a job, what goes wrong on clusters.

`diagnosis` decides which checks run where: `login` on the login node, `node_program` on each node,
asked by `nodes`; `node_checks` and `network` judge, as pure functions. `inputs` is what `submit` refuses.
"""
