"""Losses and metrics over whole data sets, and the best of them."""
