"""Runs inside training loops and trainers that are not stretto's."""

from stretto.integrations.meter import StepMeter
from stretto.integrations.scheduler import ClockScheduler

__all__ = ["ClockScheduler", "StepMeter"]
