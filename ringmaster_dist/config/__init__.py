"""Configuration: found, composed by Hydra, checked, and turned into typed objects once."""
