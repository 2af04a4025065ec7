"""Tables, pictures and pages of plans and runs, and comparisons of both."""

from __future__ import annotations

from stretto.report.advice import Advice, read_advice
from stretto.report.pictures import draw
from stretto.report.run import Comparison, Difference, RunMetrics, compare, read_metrics
from stretto.report.tables import plan_table, run_table
from stretto.run_folder import LedgerRow, read_ledger

__all__ = [
    "Advice",
    "Comparison",
    "Difference",
    "LedgerRow",
    "RunMetrics",
    "compare",
    "draw",
    "plan_table",
    "read_advice",
    "read_ledger",
    "read_metrics",
    "run_table",
]
