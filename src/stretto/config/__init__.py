"""Run files: YAML read strictly and safely, and the objects that it describes."""
