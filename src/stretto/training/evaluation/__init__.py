"""Evaluation: loss and metrics over whole data sets, and the best result."""
