"""Small whole numbers are computed for real (filled in later)."""

from __future__ import annotations

from typing import Any


def start(library: Any) -> None:
    """Start."""
