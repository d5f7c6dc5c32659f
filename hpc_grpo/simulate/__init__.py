"""Forecast the time of a run, before it starts or on other nodes: the driver's code runs on simulated clocks."""
