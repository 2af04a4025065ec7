"""Samples of a map-style data set: which, by which workers, and how they are put together."""
