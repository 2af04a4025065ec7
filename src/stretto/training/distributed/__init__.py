"""The processes of a run, and what they must agree on."""
