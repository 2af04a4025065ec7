"""What was planned and what was done, as pictures, tables and comparisons."""
