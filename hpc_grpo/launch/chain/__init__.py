"""A run as a chain of jobs: each job keeps two jobs waiting behind it, until the run is complete or cannot continue."""
