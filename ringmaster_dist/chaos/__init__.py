"""A training under faults, by a seeded schedule, and what became of it."""
