"""Runs inside training loops and trainers that are not stretto's."""

from stretto.integrations.shared import ClockScheduler, Pass, StepMeter

__all__ = ["ClockScheduler", "Pass", "StepMeter"]
