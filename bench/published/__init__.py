"""Peaks of memory that others published for real GPUs, and the runs that hold ours against them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from published.rows import Family, Row, source

__all__ = ["FAMILIES", "Family", "Row", "load", "source"]

FAMILIES = tuple(
    name
    for name in ("peft_image", "peft_text", "nanogpt", "titan", "xmem", "others")
    if find_spec(f"published.{name}")
)
"""The modules of this package that have a `FAMILY`, in the order of the page."""


def load(key: str) -> Family:
    """Return a family."""
    family: Family = importlib.import_module(f"published.{key}").FAMILY
    return family
