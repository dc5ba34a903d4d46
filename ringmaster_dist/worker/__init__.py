"""A worker: takes a snapshot, computes a gradient, pushes it, goes on from what it gets back."""
