"""A run file to objects: plan, data, model, trainer."""
