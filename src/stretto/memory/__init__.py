"""The largest micro-batch that fits into memory, known before anything runs out of it."""

from stretto.memory.recognise import is_out_of_memory

__all__ = ["is_out_of_memory"]
