"""Forecast the time of a run on other nodes: the driver's code runs on simulated clocks."""
