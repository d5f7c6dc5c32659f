"""The node agent's process: owns Ray and everything else that a run does on one node."""
