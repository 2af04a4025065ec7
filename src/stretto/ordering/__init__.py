"""The order of samples in constant memory, and each rank's share of it."""

from stretto.ordering.order import SampleOrder
from stretto.ordering.share import evenly, share, stream_start

__all__ = ["SampleOrder", "evenly", "share", "stream_start"]
