"""The launching half: nodes, Ray, the environment, jobs and signals. Only agent/ray_program.py imports ray or torch."""
