"""Policies whose sizes are known before the run."""
