# Written by tests/test_public_face.py from the table in __init__.py; do not edit.
from stretto.batching import AtLeast as AtLeast
from stretto.batching import AtMost as AtMost
from stretto.batching import BatchSizePolicy as BatchSizePolicy
from stretto.batching import BoundPolicy as BoundPolicy
from stretto.batching import DoublingRamp as DoublingRamp
from stretto.batching import Fixed as Fixed
from stretto.batching import FunctionRule as FunctionRule
from stretto.batching import Hold as Hold
from stretto.batching import Hysteresis as Hysteresis
from stretto.batching import IncreaseFunction as IncreaseFunction
from stretto.batching import IncreaseInsteadOfDecay as IncreaseInsteadOfDecay
from stretto.batching import LearningRateRule as LearningRateRule
from stretto.batching import LinearRamp as LinearRamp
from stretto.batching import LinearRule as LinearRule
from stretto.batching import Monotone as Monotone
from stretto.batching import MultipleOf as MultipleOf
from stretto.batching import NoRule as NoRule
from stretto.batching import NoiseScale as NoiseScale
from stretto.batching import NormTest as NormTest
from stretto.batching import PeriodSizes as PeriodSizes
from stretto.batching import Plateau as Plateau
from stretto.batching import PowerOfTwo as PowerOfTwo
from stretto.batching import Seesaw as Seesaw
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
from stretto.errors import FitError as FitError
from stretto.errors import MissingPackageError as MissingPackageError
from stretto.errors import PlanError as PlanError
from stretto.errors import ScheduleError as ScheduleError
from stretto.errors import StrettoError as StrettoError
from stretto.errors import TimeError as TimeError
from stretto.errors import TrainingError as TrainingError
from stretto.errors import UnitError as UnitError
from stretto.memory import find_batch_size as find_batch_size
from stretto.memory import is_out_of_memory as is_out_of_memory
from stretto.noise import NoiseEstimator as NoiseEstimator
from stretto.noise import NoiseSums as NoiseSums
from stretto.noise import NoiseTerms as NoiseTerms
from stretto.noise import noise_terms as noise_terms
from stretto.optim import Hyperparameters as Hyperparameters
from stretto.optim import from_torch as from_torch
from stretto.ordering import SampleOrder as SampleOrder
from stretto.planning import Plan as Plan
from stretto.planning import plan as plan
from stretto.runtime import SupervisedStep as SupervisedStep
from stretto.runtime import TrainStep as TrainStep
from stretto.schedules import Constant as Constant
from stretto.schedules import Cosine as Cosine
from stretto.schedules import CosineRestarts as CosineRestarts
from stretto.schedules import Curve as Curve
from stretto.schedules import Custom as Custom
from stretto.schedules import Exponential as Exponential
from stretto.schedules import InverseSqrt as InverseSqrt
from stretto.schedules import Linear as Linear
from stretto.schedules import MultiStep as MultiStep
from stretto.schedules import Periods as Periods
from stretto.schedules import Polynomial as Polynomial
from stretto.schedules import Product as Product
from stretto.schedules import Rest as Rest
from stretto.schedules import Schedule as Schedule
from stretto.schedules import Step as Step
from stretto.schedules import WSD as WSD
from stretto.timing import At as At
from stretto.timing import Every as Every
from stretto.timing import Horizon as Horizon
from stretto.timing import Time as Time
from stretto.timing import TimeUnit as TimeUnit
from stretto.timing import Timer as Timer
from stretto.timing import Timestamp as Timestamp
from stretto.timing import convert as convert
from stretto.training import Callback as Callback
from stretto.training import Checkpointing as Checkpointing
from stretto.training import Evaluation as Evaluation
from stretto.training import Loading as Loading
from stretto.training import Logger as Logger
from stretto.training import Logging as Logging
from stretto.training import MLflowLogger as MLflowLogger
from stretto.training import Run as Run
from stretto.training import Stepping as Stepping
from stretto.training import TensorBoardLogger as TensorBoardLogger
from stretto.training import Trainer as Trainer
from stretto.training import WandbLogger as WandbLogger
from stretto.training import shard_blocks as shard_blocks

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
    "Callback",
    "CheckpointError",
    "Checkpointing",
    "ConfigError",
    "Constant",
    "ConversionError",
    "Cosine",
    "CosineRestarts",
    "Curve",
    "Custom",
    "DataError",
    "DataSpec",
    "DoublingRamp",
    "Evaluation",
    "Every",
    "Exponential",
    "FitError",
    "Fixed",
    "FunctionRule",
    "Hold",
    "Horizon",
    "Hyperparameters",
    "Hysteresis",
    "IncreaseFunction",
    "IncreaseInsteadOfDecay",
    "InverseSqrt",
    "LearningRateRule",
    "Linear",
    "LinearRamp",
    "LinearRule",
    "Loading",
    "Logger",
    "Logging",
    "MLflowLogger",
    "MicroBatch",
    "MissingPackageError",
    "Monotone",
    "MultiStep",
    "MultipleOf",
    "NoRule",
    "NoiseEstimator",
    "NoiseScale",
    "NoiseSums",
    "NoiseTerms",
    "NormTest",
    "PeriodSizes",
    "Periods",
    "Plan",
    "PlanError",
    "Plateau",
    "Polynomial",
    "PowerOfTwo",
    "Product",
    "Rest",
    "Run",
    "SampleOrder",
    "Schedule",
    "ScheduleError",
    "Seesaw",
    "Signals",
    "SizeFunction",
    "Split",
    "SquareRootRule",
    "StagedRamp",
    "Step",
    "StepLoader",
    "Stepping",
    "Steps",
    "StrettoError",
    "SupervisedStep",
    "TensorBoardLogger",
    "Time",
    "TimeError",
    "TimeUnit",
    "Timer",
    "Timestamp",
    "TrainStep",
    "Trainer",
    "TrainingError",
    "UnitError",
    "WSD",
    "WandbLogger",
    "convert",
    "find_batch_size",
    "from_torch",
    "is_out_of_memory",
    "noise_terms",
    "plan",
    "rampup",
    "sample_seed",
    "shard_blocks",
    "split",
]
