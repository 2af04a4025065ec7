"""The order of samples in constant memory, and each rank's share of it."""

from stretto.ordering.order import SampleOrder
from stretto.ordering.share import share, stream_start

__all__ = ["SampleOrder", "share", "stream_start"]
