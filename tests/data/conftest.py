"""Fixtures of the tests of loading."""

from __future__ import annotations

import pytest

from stretto.data import source


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers fetch 8 samples at once, so that small data have several chunks."""
    monkeypatch.setattr(source, "LEAST_CHUNK", 8)
