"""Runs the paper's experiments and our own in virtual time: grids, runs, tables and figures."""
