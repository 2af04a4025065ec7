"""One optimizer step: weights, micro-batches that fit, noise, and whether it may be applied."""
