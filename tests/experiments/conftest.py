from __future__ import annotations

from tests.training.conftest import problem

__all__ = ["problem"]
