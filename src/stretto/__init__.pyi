# Written by tests/test_public_face.py from the table in __init__.py; do not edit.
from stretto.batching import AtLeast as AtLeast
from stretto.batching import AtMost as AtMost
from stretto.batching import BatchSizePolicy as BatchSizePolicy
from stretto.batching import BoundPolicy as BoundPolicy
from stretto.batching import DoublingRamp as DoublingRamp
from stretto.batching import Fixed as Fixed
from stretto.batching import FunctionRule as FunctionRule
from stretto.batching import Hysteresis as Hysteresis
from stretto.batching import IncreaseFunction as IncreaseFunction
from stretto.batching import LearningRateRule as LearningRateRule
from stretto.batching import LinearRamp as LinearRamp
from stretto.batching import LinearRule as LinearRule
from stretto.batching import Monotone as Monotone
from stretto.batching import MultipleOf as MultipleOf
from stretto.batching import NoRule as NoRule
from stretto.batching import PeriodSizes as PeriodSizes
from stretto.batching import PowerOfTwo as PowerOfTwo
from stretto.batching import Signals as Signals
from stretto.batching import SizeFunction as SizeFunction
from stretto.batching import Split as Split
from stretto.batching import SquareRootRule as SquareRootRule
from stretto.batching import StagedRamp as StagedRamp
from stretto.batching import Steps as Steps
from stretto.batching import rampup as rampup
from stretto.batching import split as split
from stretto.data import DataSpec as DataSpec
from stretto.data import MicroBatch as MicroBatch
from stretto.data import StepLoader as StepLoader
from stretto.data import sample_seed as sample_seed
from stretto.errors import BatchSizeError as BatchSizeError
from stretto.errors import CheckpointError as CheckpointError
from stretto.errors import ConfigError as ConfigError
from stretto.errors import ConversionError as ConversionError
from stretto.errors import DataError as DataError
from stretto.errors import MissingPackageError as MissingPackageError
from stretto.errors import PlanError as PlanError
from stretto.errors import ScheduleError as ScheduleError
from stretto.errors import StrettoError as StrettoError
from stretto.errors import TimeError as TimeError
from stretto.errors import TrainingError as TrainingError
from stretto.errors import UnitError as UnitError
from stretto.optim import Hyperparameters as Hyperparameters
from stretto.optim import from_torch as from_torch
from stretto.ordering import SampleOrder as SampleOrder
from stretto.planning import Plan as Plan
from stretto.planning import plan as plan
from stretto.timing import At as At
from stretto.timing import Every as Every
from stretto.timing import Horizon as Horizon
from stretto.timing import Time as Time
from stretto.timing import TimeUnit as TimeUnit
from stretto.timing import Timer as Timer
from stretto.timing import Timestamp as Timestamp
from stretto.timing import convert as convert

_FACE: dict[str, tuple[str, ...]]
_HOME: dict[str, str]
__version__: str
__all__ = [
    "At",
    "AtLeast",
    "AtMost",
    "BatchSizeError",
    "BatchSizePolicy",
    "BoundPolicy",
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "DataSpec",
    "DoublingRamp",
    "Every",
    "Fixed",
    "FunctionRule",
    "Horizon",
    "Hyperparameters",
    "Hysteresis",
    "IncreaseFunction",
    "LearningRateRule",
    "LinearRamp",
    "LinearRule",
    "MicroBatch",
    "MissingPackageError",
    "Monotone",
    "MultipleOf",
    "NoRule",
    "PeriodSizes",
    "Plan",
    "PlanError",
    "PowerOfTwo",
    "SampleOrder",
    "ScheduleError",
    "Signals",
    "SizeFunction",
    "Split",
    "SquareRootRule",
    "StagedRamp",
    "StepLoader",
    "Steps",
    "StrettoError",
    "Time",
    "TimeError",
    "TimeUnit",
    "Timer",
    "Timestamp",
    "TrainingError",
    "UnitError",
    "convert",
    "from_torch",
    "plan",
    "rampup",
    "sample_seed",
    "split",
]
