"""What a run would take on other nodes, before they are asked for: its driver's own code on simulated clocks."""
