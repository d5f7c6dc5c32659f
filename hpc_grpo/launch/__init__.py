"""The launching half: nodes, Ray, the environment, jobs and signals. Imports neither torch nor ray."""
