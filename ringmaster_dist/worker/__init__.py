"""A worker takes a snapshot, computes a gradient, pushes it and continues from the reply."""
