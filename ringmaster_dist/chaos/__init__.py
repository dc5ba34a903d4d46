"""A training under faults, which a seeded schedule chooses, and an account of the result."""
