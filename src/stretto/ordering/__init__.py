"""Which sample comes when: a keyed order in constant memory, and each rank's part of it."""

from stretto.ordering.order import SampleOrder
from stretto.ordering.share import share, stream_start

__all__ = ["SampleOrder", "share", "stream_start"]
