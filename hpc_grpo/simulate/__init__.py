"""Forecast the time of a run on other nodes, by its driver's code on simulated clocks."""
