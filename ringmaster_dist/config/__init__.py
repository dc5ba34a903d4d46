"""The configuration: declared in one schema, composed by Hydra, checked, and made into typed objects once."""
