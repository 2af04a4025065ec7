"""Data that can only be read in order, cut into exact batches."""
