# Written by tests/test_public_face.py from the table in __init__.py; do not edit.
from stretto import batching as batching
from stretto import checkpoint as checkpoint
from stretto import data as data
from stretto import distributed as distributed
from stretto import errors as errors
from stretto import integrations as integrations
from stretto import memory as memory
from stretto import noise as noise
from stretto import optim as optim
from stretto import ordering as ordering
from stretto import planning as planning
from stretto import report as report
from stretto import runtime as runtime
from stretto import schedules as schedules
from stretto import timing as timing
from stretto import training as training
from stretto.batching import AtMost as AtMost
from stretto.batching import BatchSizePolicy as BatchSizePolicy
from stretto.batching import DoublingRamp as DoublingRamp
from stretto.batching import LinearRamp as LinearRamp
from stretto.batching import LinearRule as LinearRule
from stretto.batching import NoiseScale as NoiseScale
from stretto.batching import PiecewiseConstant as PiecewiseConstant
from stretto.batching import Seesaw as Seesaw
from stretto.batching import SquareRootRule as SquareRootRule
from stretto.data import DataSpec as DataSpec
from stretto.data import Step as Step
from stretto.data import StepLoader as StepLoader
from stretto.data import count_lengths as count_lengths
from stretto.errors import StrettoError as StrettoError
from stretto.memory import Answer as Answer
from stretto.memory import find_batch_size as find_batch_size
from stretto.optim import Hyperparameters as Hyperparameters
from stretto.planning import Plan as Plan
from stretto.planning import plan as plan
from stretto.runtime import SupervisedStep as SupervisedStep
from stretto.runtime import TrainStep as TrainStep
from stretto.schedules import Cosine as Cosine
from stretto.schedules import Linear as Linear
from stretto.schedules import Schedule as Schedule
from stretto.schedules import WSD as WSD
from stretto.timing import At as At
from stretto.timing import Every as Every
from stretto.timing import Horizon as Horizon
from stretto.timing import Time as Time
from stretto.timing import Timestamp as Timestamp
from stretto.timing import Trigger as Trigger
from stretto.timing import convert as convert
from stretto.training import Callback as Callback
from stretto.training import Checkpointing as Checkpointing
from stretto.training import Evaluation as Evaluation
from stretto.training import Loading as Loading
from stretto.training import Logger as Logger
from stretto.training import Logging as Logging
from stretto.training import Run as Run
from stretto.training import Stepping as Stepping
from stretto.training import Trainer as Trainer
from stretto.training import prepare as prepare

_FACE: dict[str, tuple[str, ...]]
_HOME: dict[str, str]
_MODULES: tuple[str, ...]
__version__: str
__all__ = [
    "Answer",
    "At",
    "AtMost",
    "BatchSizePolicy",
    "Callback",
    "Checkpointing",
    "Cosine",
    "DataSpec",
    "DoublingRamp",
    "Evaluation",
    "Every",
    "Horizon",
    "Hyperparameters",
    "Linear",
    "LinearRamp",
    "LinearRule",
    "Loading",
    "Logger",
    "Logging",
    "NoiseScale",
    "PiecewiseConstant",
    "Plan",
    "Run",
    "Schedule",
    "Seesaw",
    "SquareRootRule",
    "Step",
    "StepLoader",
    "Stepping",
    "StrettoError",
    "SupervisedStep",
    "Time",
    "Timestamp",
    "TrainStep",
    "Trainer",
    "Trigger",
    "WSD",
    "convert",
    "count_lengths",
    "find_batch_size",
    "plan",
    "prepare",
]
