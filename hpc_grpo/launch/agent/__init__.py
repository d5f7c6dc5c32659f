"""The node agent's process: manages Ray and all other processes of a run on one node."""
