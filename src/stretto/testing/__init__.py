"""What helps to test code that uses stretto: hypothesis strategies and slow, plain models.

Needs hypothesis: `pip install hypothesis`. Nothing else in stretto imports this package.
"""

from stretto.testing.timing import (
    count_by_hand,
    horizons,
    lengths,
    times,
    timestamps,
    units,
)

__all__ = ["count_by_hand", "horizons", "lengths", "times", "timestamps", "units"]
