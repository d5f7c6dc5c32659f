"""The launching half: nodes, Ray, the environment, processes and signals.

Imports neither torch nor ray: it must start on a login node in a fraction of a second. What training needs
to know reaches it through environment variables (`driver.py`) and the run directory, nothing else.
"""

DEFAULT_DRIVER = "hpc_grpo.driver.main"
