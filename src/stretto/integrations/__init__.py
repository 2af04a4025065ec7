"""Runs inside training loops and trainers that are not stretto's."""

from stretto.integrations.counts import Count
from stretto.integrations.meter import StepMeter
from stretto.integrations.run import ExternalRun, MicroBatchView, prepare
from stretto.integrations.scheduler import ClockScheduler

__all__ = ["ClockScheduler", "Count", "ExternalRun", "MicroBatchView", "StepMeter", "prepare"]
