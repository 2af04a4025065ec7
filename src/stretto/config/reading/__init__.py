"""A run file as plain values: its YAML, overrides, and where each value stands."""
