"""Trains under a seeded schedule of faults, and reports the result."""
