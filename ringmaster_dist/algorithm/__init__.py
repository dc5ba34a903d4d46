"""Implements the algorithm with torch only: geometries, flat layout, schedules, methods and the update."""
