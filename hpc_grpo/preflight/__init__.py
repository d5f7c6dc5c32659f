"""Preflight checks: find in a minute, before a job, what goes wrong on clusters.

`diagnosis` decides which checks run where: `login` and `scheduler` on the login node, `node_program` as a process on
each node, asked by `nodes`. Facts are gathered apart from judging them: `node_checks` and `network` are pure functions
from facts to findings. `inputs` is what `submit` refuses, `prefetch` fills the caches that a job reads.

Belongs to the launching half: what needs torch runs in a process of its own, with a deadline.
"""
