"""A model of the caching allocator of CUDA."""
