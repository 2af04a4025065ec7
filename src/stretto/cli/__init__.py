"""The command line: verbs, with no logic of their own."""

from __future__ import annotations

from stretto.cli.app import main

__all__ = ["main"]
