"""Predict the memory of a step with fake tensors and a model of the allocator."""
