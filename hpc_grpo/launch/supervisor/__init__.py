"""The supervisor's process: manages one attempt, from the first process on its nodes to the last."""
