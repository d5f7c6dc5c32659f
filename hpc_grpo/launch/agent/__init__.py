"""The node agent's process: manages Ray, and so the actors, on one node."""
