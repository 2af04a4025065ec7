"""The memory of real steps, which are undone afterwards."""
