"""Places: which nodes a run has, how an agent starts there, when time ends, whether an attempt lives."""
