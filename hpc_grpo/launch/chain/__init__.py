"""A run as a chain of jobs: two jobs wait behind each, until the run is complete or cannot go on."""
