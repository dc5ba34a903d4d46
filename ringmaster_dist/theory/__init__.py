"""What the paper proves about time."""
