"""The memory of a step without taking it: on fake tensors, with a model of the allocator."""
