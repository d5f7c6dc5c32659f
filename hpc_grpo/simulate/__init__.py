"""Forecast what a run would take on other nodes, by its driver's own code on simulated clocks."""
