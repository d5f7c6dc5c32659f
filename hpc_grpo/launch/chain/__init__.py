"""A run as a chain of jobs: each queues the next, until the run is complete or cannot go on."""
