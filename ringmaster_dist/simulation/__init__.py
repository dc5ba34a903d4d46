"""The virtual clock: thousands of simulated workers around the real server core."""
