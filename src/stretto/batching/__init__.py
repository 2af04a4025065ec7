"""Batch size policies, how a batch is split, and learning rates that follow its size."""

from stretto.batching.functions import (
    AsManyAsFit,
    IncreaseFunction,
    SizeFunction,
    awaits_maximum,
    with_maximum,
)
from stretto.batching.noise_scale import NoiseScale, NormTest
from stretto.batching.pack import pack
from stretto.batching.periods import PeriodSizes
from stretto.batching.plateau import Plateau
from stretto.batching.policy import (
    NO_SIGNALS,
    BatchSizePolicy,
    Bound,
    Hold,
    PolicyState,
    Signals,
    Tokens,
    checked_size,
)
from stretto.batching.ramps import DoublingRamp, LinearRamp, StagedRamp, from_megatron, rampup
from stretto.batching.rules import (
    HalfLifeRule,
    LinearRule,
    Rule,
    RuleLike,
    SquareRootRule,
    as_rule,
    as_rules,
)
from stretto.batching.seesaw import (
    DecayGrowth,
    IncreaseInsteadOfDecay,
    Pair,
    Seesaw,
    Staircase,
)
from stretto.batching.split import Split, split
from stretto.batching.step_cost import StepCost
from stretto.batching.steps import Fixed, PiecewiseConstant, PolicyLike, as_policy
from stretto.batching.wrappers import AtLeast, AtMost, Hysteresis, Monotone, MultipleOf, PowerOfTwo

__all__ = [
    "AsManyAsFit",
    "AtLeast",
    "AtMost",
    "BatchSizePolicy",
    "Bound",
    "DecayGrowth",
    "DoublingRamp",
    "Fixed",
    "HalfLifeRule",
    "Hold",
    "Hysteresis",
    "IncreaseFunction",
    "IncreaseInsteadOfDecay",
    "LinearRamp",
    "LinearRule",
    "Monotone",
    "MultipleOf",
    "NO_SIGNALS",
    "NoiseScale",
    "NormTest",
    "Pair",
    "PeriodSizes",
    "Plateau",
    "PolicyLike",
    "PolicyState",
    "PowerOfTwo",
    "Rule",
    "RuleLike",
    "Seesaw",
    "Signals",
    "SizeFunction",
    "Split",
    "SquareRootRule",
    "StagedRamp",
    "Staircase",
    "StepCost",
    "Tokens",
    "PiecewiseConstant",
    "as_policy",
    "as_rule",
    "as_rules",
    "awaits_maximum",
    "checked_size",
    "from_megatron",
    "pack",
    "rampup",
    "split",
    "with_maximum",
]
