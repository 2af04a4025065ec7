"""Policies that grow the batch where the learning rate would decay."""
