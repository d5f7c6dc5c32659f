"""The launching half: nodes, Ray, the environment, processes and signals.

Imports neither torch nor ray: it must start on a login node in a fraction of a second. What training needs
to know reaches it through environment variables (`run/contract.py`) and the run directory, nothing else.
"""
