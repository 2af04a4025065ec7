"""Train PyTorch models with a batch size that changes, on one exact clock."""

from __future__ import annotations

__version__ = "0.1.0"
