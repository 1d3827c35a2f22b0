"""Measurement: named suites of problems, timing against a peer in one run, and the grid the tuner measures."""
