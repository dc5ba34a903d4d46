"""Runs thousands of simulated workers with a virtual clock around the real server core."""
