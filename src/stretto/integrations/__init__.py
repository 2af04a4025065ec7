"""Runs inside training loops and trainers that are not stretto's."""

from stretto.integrations.counts import Count
from stretto.integrations.meter import StepMeter
from stretto.integrations.preparation import prepare
from stretto.integrations.run import ExternalRun
from stretto.integrations.scheduler import ClockScheduler
from stretto.integrations.weights import MicroBatchView

__all__ = ["ClockScheduler", "Count", "ExternalRun", "MicroBatchView", "StepMeter", "prepare"]
