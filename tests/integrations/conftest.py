"""Chooses the tests of adapters: a small case of each here, all in `make test-adapters`."""

from __future__ import annotations

import os

import pytest

FRAMEWORKS = ("accelerate", "huggingface", "lightning")
"""Those whose packages `make test` has; their files are `test_<name>.py`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless `make test-adapters` asks for it."""
    if os.environ.get("STRETTO_ADAPTERS"):
        return
    for item in items:
        name = item.path.stem.removeprefix("test_")
        if name in FRAMEWORKS and item.get_closest_marker("small") is None:
            item.add_marker(pytest.mark.skip("takes long: make test-adapters"))
