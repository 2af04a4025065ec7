"""Plots, tables and comparisons of plans and runs."""

from __future__ import annotations

from stretto.report.ledger import Comparison, Difference, compare
from stretto.report.pictures import draw
from stretto.report.run import RunMetrics, read_metrics, run_table
from stretto.run_folder import LedgerRow, read_ledger

__all__ = [
    "Comparison",
    "Difference",
    "LedgerRow",
    "RunMetrics",
    "compare",
    "draw",
    "read_ledger",
    "read_metrics",
    "run_table",
]
