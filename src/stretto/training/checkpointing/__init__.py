"""What a run remembers, when it is saved, and what it resumes from."""
