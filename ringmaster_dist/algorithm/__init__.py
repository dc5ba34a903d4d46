"""The algorithm, pure: geometries, flat layout, schedules, methods and the update. Torch only."""
