"""The supervisor's process: owns one attempt, from the first process on its nodes to the last."""
