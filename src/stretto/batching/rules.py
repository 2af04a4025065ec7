"""Learning rate rules: how the learning rate follows the batch size."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from stretto.batching.policy import checked_size
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import name_of


def is_learning_rate(name: str) -> bool:
    """Return whether a hyper-parameter is a learning rate: `lr`, or `lr@group`.

    >>> is_learning_rate("lr@head"), is_learning_rate("weight_decay")
    (True, False)
    """
    return name.partition("@")[0] == "lr"


class LearningRateRule(ABC):
    """A function from the batch size to a factor of the learning rate.

    The size is the one that the policy decided, so a batch that is cut at the end of an epoch has
    the factor of a full one. The factor is computed anew for each batch, never accumulated.

    >>> isinstance(LinearRule(256), LearningRateRule), LinearRule(256)(512)
    (True, 2.0)
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, size: int, /) -> float:
        """Return the factor for a batch of `size` samples."""


@final
@dataclass(frozen=True, slots=True)
class NoRule(LearningRateRule):
    """The learning rate does not follow the batch size.

    >>> NoRule()(512)
    1.0
    """

    def __call__(self, size: int, /) -> float:
        """Return 1."""
        del size
        return 1.0


@dataclass(frozen=True, slots=True)
class _Referenced(LearningRateRule):
    """A rule relative to the batch size for which the learning rate was chosen."""

    reference: int

    def __post_init__(self) -> None:
        reference = checked_size(self.reference, "the reference of a learning rate rule")
        object.__setattr__(self, "reference", reference)


@final
@dataclass(frozen=True, slots=True)
class LinearRule(_Referenced):
    """`size / reference`: usual with SGD (Goyal et al. 2017, arXiv 1706.02677, section 2.1).

    >>> LinearRule(256)(1024)
    4.0

    Args:
        reference: the batch size for which the learning rate was chosen.

    Raises:
        BatchSizeError: the reference is not an integer of at least 1.
    """

    def __call__(self, size: int, /) -> float:
        """Return `size / reference`."""
        return size / self.reference


@final
@dataclass(frozen=True, slots=True)
class SquareRootRule(_Referenced):
    """`sqrt(size / reference)`: usual with Adam (Malladi et al. 2022, arXiv 2205.10287).

    >>> SquareRootRule(256)(1024)
    2.0

    Args:
        reference: the batch size for which the learning rate was chosen.

    Raises:
        BatchSizeError: the reference is not an integer of at least 1.
    """

    def __call__(self, size: int, /) -> float:
        """Return `sqrt(size / reference)`."""
        return math.sqrt(size / self.reference)


@final
@dataclass(frozen=True, slots=True)
class FunctionRule(LearningRateRule):
    """A function of your own from the size to a factor.

    >>> FunctionRule(lambda size: min(2.0, size / 256))(1024)
    2.0

    Args:
        function: returns a finite factor of at least 0 for each size; it must be pure.

    Raises:
        BatchSizeError: it cannot be called.
    """

    function: Callable[[int], float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise BatchSizeError.cannot(
                f"use {shown(self.function)} as a learning rate rule",
                why="it is not a function",
                instead="pass a function size -> factor, or LinearRule(256)",
            )

    def __call__(self, size: int, /) -> float:
        """Return the factor.

        Raises:
            BatchSizeError: the function did not return a finite number of at least 0.
        """
        factor: Any = self.function(size)
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number or not math.isfinite(factor) or factor < 0:
            raise BatchSizeError.cannot(
                f"multiply the learning rate by {shown(factor)}",
                why="it is not a finite number of at least 0",
                instead="return a factor such as 1.0",
                where=f"{name_of(self.function)}({size})",
            )
        return float(factor)

    def __repr__(self) -> str:
        return f"FunctionRule({name_of(self.function)})"


RuleLike: TypeAlias = LearningRateRule | Mapping[str, Any] | Callable[[int], float]
"""A rule, its form in a run file (`{"sqrt": 256}`), or a function `size -> factor`."""

RULES: Mapping[str, Callable[[Any], LearningRateRule]] = {
    "linear": LinearRule,
    "sqrt": SquareRootRule,
}
"""The rules that a mapping can name."""


def as_rule(rule: RuleLike) -> LearningRateRule:
    """Return the learning rate rule that `rule` describes, as in a run file or as a function.

    >>> as_rule({"sqrt": 256}), as_rule({"linear": 256})
    (SquareRootRule(reference=256), LinearRule(reference=256))

    Raises:
        BatchSizeError: it describes no rule.
    """
    value: object = rule
    instead = "write {'linear': 256}, {'sqrt': 256} or a function size -> factor"
    if isinstance(value, LearningRateRule):
        return value
    if isinstance(value, Mapping):
        if len(value) == 1 and next(iter(value)) in RULES:
            [(name, argument)] = value.items()
            return RULES[name](argument)
        why = "it is not exactly one of 'linear' and 'sqrt'"
    elif callable(value):
        return FunctionRule(value)
    elif isinstance(value, str) and value in RULES:
        why = "it does not say which batch size the learning rate was chosen for"
        instead = f"write for example {{{value!r}: 256}}"
    else:
        why = "it is not a rule, a mapping or a function"
    what = f"use {shown(value)} as a learning rate rule"
    raise BatchSizeError.cannot(what, why=why, instead=instead)
