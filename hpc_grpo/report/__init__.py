"""Show the state, the history and the results of runs, from their directories, on any machine."""
