"""Hypothesis strategies, for tests of code that uses stretto.

Needs hypothesis: `pip install hypothesis`. Nothing else in stretto imports this package.
"""

from stretto.testing.timing import horizons, lengths, times, timestamps, units

__all__ = ["horizons", "lengths", "times", "timestamps", "units"]
