"""Predict the memory of a step on a GPU, without one."""
