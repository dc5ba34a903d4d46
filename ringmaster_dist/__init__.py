"""Asynchronous Muon, and every other LMO-based optimizer, on machines of unequal speed."""

__version__ = "1.0.0"
