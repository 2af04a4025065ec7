"""Runs inside training loops and trainers that are not stretto's."""

from stretto.integrations.shared import ClockScheduler

__all__ = ["ClockScheduler"]
