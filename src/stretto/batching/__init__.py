"""Batch size policies, how a batch is split, and learning rates that follow its size."""

from stretto.batching.adaptive.hysteresis import Hysteresis
from stretto.batching.adaptive.noise_scale import NoiseScale, NormTest
from stretto.batching.adaptive.plateau import Plateau
from stretto.batching.coupled.coupling import Coupling
from stretto.batching.coupled.seesaw import (
    IncreaseInsteadOfDecay,
    Seesaw,
    check_pairs,
    couplings_in,
)
from stretto.batching.parse import PolicyLike, as_policy
from stretto.batching.policy import (
    BatchSizePolicy,
    BoundPolicy,
    Hold,
    PolicyState,
    TimedPolicy,
    checked_size,
)
from stretto.batching.rules import (
    FunctionRule,
    LearningRateRule,
    LinearRule,
    NoRule,
    RuleLike,
    SquareRootRule,
    as_rule,
)
from stretto.batching.scheduled.fixed import Fixed, Steps
from stretto.batching.scheduled.functions import SizeFunction
from stretto.batching.scheduled.increase import IncreaseFunction, awaits_maximum, with_maximum
from stretto.batching.scheduled.periods import PeriodSizes
from stretto.batching.scheduled.ramps import DoublingRamp, LinearRamp, StagedRamp, rampup
from stretto.batching.signals import NO_SIGNALS, Signals
from stretto.batching.split import Split, split
from stretto.batching.wrappers import AtLeast, AtMost, Monotone, MultipleOf, PowerOfTwo

__all__ = [
    "AtLeast",
    "AtMost",
    "BatchSizePolicy",
    "BoundPolicy",
    "Coupling",
    "DoublingRamp",
    "Fixed",
    "FunctionRule",
    "Hold",
    "Hysteresis",
    "IncreaseFunction",
    "IncreaseInsteadOfDecay",
    "LearningRateRule",
    "LinearRamp",
    "LinearRule",
    "Monotone",
    "MultipleOf",
    "NO_SIGNALS",
    "NoRule",
    "NoiseScale",
    "NormTest",
    "PeriodSizes",
    "Plateau",
    "PolicyLike",
    "PolicyState",
    "PowerOfTwo",
    "RuleLike",
    "Seesaw",
    "Signals",
    "SizeFunction",
    "Split",
    "SquareRootRule",
    "StagedRamp",
    "Steps",
    "TimedPolicy",
    "as_policy",
    "as_rule",
    "awaits_maximum",
    "check_pairs",
    "couplings_in",
    "checked_size",
    "rampup",
    "split",
    "with_maximum",
]
