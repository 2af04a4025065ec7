"""Which batch size is the largest that fits."""
