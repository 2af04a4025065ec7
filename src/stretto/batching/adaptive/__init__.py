"""Policies that follow what the run measures."""
