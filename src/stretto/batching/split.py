"""`split`: one batch over ranks and micro-batches."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, final

from stretto.batching.policy import Size, Tokens, checked_size, checked_world_size, has_tokens
from stretto.errors import BatchSizeError
from stretto.ordering import evenly, stream_start
from stretto.schedules.fields import fill
from stretto.timing.grammar import NAMES, TimeUnit, whole


@final
@dataclass(frozen=True, slots=True)
class Split:
    """How the batch `[start, start + size)` is shared; made by `split`.

    Rank r of W owns the positions i with `i % W == r`, so shares differ by at most one sample.
    All ranks run the same number of micro-batches, because collectives inside a model need it. A
    rank without samples runs a dummy of weight 0.

    >>> parts = split(13, 4, 2)
    >>> parts.shares, parts.accumulation
    ((4, 3, 3, 3), 2)
    """

    size: int
    """Samples of the batch, over all ranks."""
    world_size: int
    """How many ranks share it."""
    micro_batch_size: int | None
    """The most samples in one micro-batch; None: a share is one micro-batch."""
    start: int = 0
    """The position of the batch's first sample."""

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank."""
        return tuple(self.share(rank) for rank in range(self.world_size))

    def share(self, rank: int) -> int:
        """Return the samples of one rank: the positions i in the batch with `i % W == rank`."""
        world = self.world_size
        return stream_start(self.start + self.size, rank, world) - stream_start(
            self.start, rank, world
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank: as many as the largest share needs."""
        if self.micro_batch_size is None:
            return 1
        largest = -(-self.size // self.world_size)
        return -(-largest // self.micro_batch_size)

    def micro_batch_sizes(self, rank: int) -> tuple[int, ...]:
        """Return the sizes of one rank's micro-batches: they differ by at most one.

        >>> split(13, 4, 2).micro_batch_sizes(0), split(13, 4, 2).micro_batch_sizes(3)
        ((2, 2), (2, 1))
        """
        return evenly(self.share(rank), parts=self.accumulation)


def split(
    size: int,
    world_size: int,
    micro_batch_size: int | None = None,
    *,
    even: bool = False,
    start: int = 0,
) -> Split:
    """Share a batch over ranks and micro-batches.

    >>> shared = split(13, 4, 2)
    >>> shared.shares, shared.accumulation
    ((4, 3, 3, 3), 2)

    Args:
        size: samples of the batch, over all ranks.
        world_size: how many ranks share it.
        micro_batch_size: the most samples that one rank takes at once; by default, its whole share.
        even: allow only multiples of `world_size * micro_batch_size`, so that every rank runs
            full micro-batches.
        start: the position of the batch's first sample; it decides which ranks get one more.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or `even` and the size is not such
            a multiple.
    """
    size = checked_size(size)
    world_size = checked_world_size(world_size)
    if micro_batch_size is not None:
        micro_batch_size = checked_size(micro_batch_size, "a micro-batch size")
    if isinstance(size, Tokens) or isinstance(micro_batch_size, Tokens):
        why = "how many tokens each sample has is not known here"
        instead = "write numbers of samples, or pack(lengths, budget, world_size)"
        raise BatchSizeError.cannot("split by amounts in tokens", why=why, instead=instead)
    position = whole(start)
    if position is None or position < 0:
        why, instead = "it is not an integer of at least 0", "pass the number of samples before it"
        raise BatchSizeError.bad("start", start, why, instead)
    unit = even_unit(world_size, micro_batch_size)
    if even and size % unit:
        raise not_even(size, world_size, micro_batch_size)
    return Split(size, world_size, micro_batch_size, position)


def in_rows(size: int, micro_batch_size: int | None, row: int) -> tuple[int, int | None]:
    """Return a batch and a micro-batch size in rows of `row` samples, at least one each.

    >>> in_rows(24, 7, row=4), in_rows(24, None, row=4)
    ((6, 1), (6, None))
    """
    micro = None if micro_batch_size is None else max(1, micro_batch_size // row)
    return max(1, size // row), micro


def even_unit(world_size: int, micro_batch_size: int | None) -> int:
    """Return the number that all evenly split sizes are multiples of."""
    return world_size * (1 if isinstance(micro_batch_size, Tokens) else micro_batch_size or 1)


def not_even(size: int, world_size: int, micro_batch_size: int | None) -> BatchSizeError:
    """Return the error for a size that cannot be split evenly."""
    unit = even_unit(world_size, micro_batch_size)
    lower = max(unit, size - size % unit)
    instead = f"write a multiple such as {lower} or {lower + unit}, or MultipleOf(policy, {unit})"
    micro = "" if micro_batch_size is None else f" with micro-batches of {micro_batch_size}"
    what = f"split {size} samples evenly over {world_size} ranks{micro}"
    return BatchSizeError.cannot(what, why=f"it is not a multiple of {unit}", instead=instead)


def is_learning_rate(name: str) -> bool:
    """Return whether a hyper-parameter is a learning rate: `lr`, or `lr@group`.

    >>> is_learning_rate("lr@head"), is_learning_rate("weight_decay")
    (True, False)
    """
    return name.partition("@")[0] == "lr"


LearningRateRule: TypeAlias = Callable[[int], float]
"""Returns the factor of the learning rate for the batch size that the policy decided.

A batch that is cut at the end of an epoch has the factor of a full one. The factor is computed anew
for each batch, never accumulated.
"""
RuleLike: TypeAlias = Mapping[str, Any] | LearningRateRule
"""A rule, or its form in a run file: `{"sqrt": 256}`."""


@dataclass(frozen=True)
class Referenced(ABC):
    """A rule relative to the batch size for which a value was chosen, in samples or tokens."""

    reference: Size
    _each: ClassVar[int] = 1
    """The tokens of a sample, if sizes are in samples and the reference is in tokens."""

    def __post_init__(self) -> None:
        fill(self, reference=checked_size(self.reference, "the reference of a learning rate rule"))

    @abstractmethod
    def __call__(self, size: int, /) -> float:
        """Return the factor for a decided size."""

    def ratio(self, size: int) -> float:
        """Return a size over the reference, correctly rounded."""
        return float(size * self._each / self.reference)

    def bind(self, unit: TimeUnit, each: int | None) -> Self:
        """Return the rule for sizes in a unit.

        Args:
            unit: the unit of the sizes: samples or tokens.
            each: the tokens of a sample, if all have equally many.

        Raises:
            BatchSizeError: the reference is in the other unit, and samples differ.
        """
        own = TimeUnit.TOKEN if has_tokens(self.reference) else TimeUnit.SAMPLE
        if own is unit:
            return self
        if unit is TimeUnit.TOKEN or each is None:
            raise BatchSizeError.cannot(
                f"use {self!r} with batch sizes in {NAMES[unit]}",
                why=f"its reference is in {NAMES[own]}, and samples are not known to have equally "
                "many tokens",
                instead="write both in samples, or both in tokens",
            )
        bound = copy.copy(self)
        fill(bound, _each=each)
        return bound


@final
@dataclass(frozen=True, slots=True)
class LinearRule(Referenced):
    """`size / reference`: usual with SGD (Goyal et al. 2017, arXiv 1706.02677, section 2.1).

    >>> LinearRule(256)(1024)
    4.0

    Args:
        reference: the batch size for which the learning rate was chosen: 256, or `"4Mtok"`.

    Raises:
        BatchSizeError: the reference is neither an integer of at least 1 nor tokens.
    """

    def __call__(self, size: int, /) -> float:
        """Return `size / reference`."""
        return self.ratio(size)


@final
@dataclass(frozen=True, slots=True)
class SquareRootRule(Referenced):
    """`sqrt(size / reference)`: usual with Adam (Malladi et al. 2022, arXiv 2205.10287).

    >>> SquareRootRule(256)(1024)
    2.0

    Args:
        reference: the batch size for which the learning rate was chosen: 256, or `"4Mtok"`.

    Raises:
        BatchSizeError: the reference is neither an integer of at least 1 nor tokens.
    """

    def __call__(self, size: int, /) -> float:
        """Return `sqrt(size / reference)`."""
        return math.sqrt(self.ratio(size))


RULES: Mapping[str, Callable[[Any], LearningRateRule]] = {
    "linear": LinearRule,
    "sqrt": SquareRootRule,
}
"""The rules that a mapping can name."""


def as_rule(rule: RuleLike) -> LearningRateRule:
    """Return the learning rate rule that `rule` describes, as in a run file or as a function.

    The factors that a function returns are checked when they are used: finite, and at least 0.

    >>> as_rule({"sqrt": 256}), as_rule({"linear": 256})
    (SquareRootRule(reference=256), LinearRule(reference=256))

    Raises:
        BatchSizeError: it describes no rule.
    """
    value: object = rule
    if isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in RULES:
        [(name, argument)] = value.items()
        return RULES[name](argument)
    if callable(value):
        return value
    why = "it is not exactly one of 'linear' and 'sqrt', with the size that the rate is meant for"
    instead = "write {'linear': 256}, {'sqrt': 256} or a function size -> factor"
    raise BatchSizeError.bad("rule", value, why, instead)
