"""The names by which a configuration chooses methods and oracles. This module imports nothing, so it loads quickly."""

METHODS = ("ringmaster", "ringmaster_agnostic", "rennala", "delay_adaptive", "synchronous", "asynchronous")
GEOMETRIES = ("spectral", "euclidean", "sign", "column", "row", "none")
ORTHOGONALIZATIONS = ("polar_express", "jordan", "exact")
MIXED = "mixed"  # a precision: bfloat16 for matrices that are about square, and the problem's own type for all others
