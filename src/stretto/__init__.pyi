# Written by tests/test_public_face.py from the table in __init__.py; do not edit.
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
    "BatchSizeError",
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "Every",
    "Horizon",
    "MissingPackageError",
    "PlanError",
    "ScheduleError",
    "StrettoError",
    "Time",
    "TimeError",
    "TimeUnit",
    "Timer",
    "Timestamp",
    "TrainingError",
    "UnitError",
    "convert",
]
