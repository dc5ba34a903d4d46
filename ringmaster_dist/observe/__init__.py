"""Writes, reads and shows the files of a run."""
