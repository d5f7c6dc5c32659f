"""A run as a chain of jobs: two follow-on jobs wait behind each job, until the run is complete or cannot continue."""
