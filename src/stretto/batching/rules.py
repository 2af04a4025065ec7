"""Rules: how a value, such as a learning rate, follows the batch size."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, final

from stretto._foreign import knows_foreign
from stretto.batching.policy import Size, checked_size, has_tokens
from stretto.errors import BatchSizeError
from stretto.schedules.fields import checked_factor, fill
from stretto.schedules.names import parse_name
from stretto.timing.grammar import NAMES, TimeUnit


def is_learning_rate(name: str) -> bool:
    """Return whether a hyper-parameter is a learning rate: `lr`, or `lr@group`.

    >>> is_learning_rate("lr@head"), is_learning_rate("weight_decay")
    (True, False)
    """
    return name.partition("@")[0] == "lr"


Rule: TypeAlias = Callable[[int], float]
"""Returns the factor of a value, such as the learning rate, for the size that the policy decided.

A batch that is cut at the end of an epoch has the factor of a full one. The factor is computed anew
for each batch, never accumulated.
"""
RuleLike: TypeAlias = Mapping[str, Any] | Rule
"""A rule of all learning rates, or its form in a run file: `{"sqrt": 256}`; or rules by name:
`{"lr@muon": SquareRootRule(256), "betas.1": HalfLifeRule(256)}`."""


@dataclass(frozen=True)
class Referenced(ABC):
    """A rule relative to the batch size for which a value was chosen, in samples or tokens."""

    reference: Size
    is_of_averages: ClassVar[bool] = False
    """Whether it is for values such as `betas.1` only, and no factor."""
    _each: ClassVar[int] = 1
    """The tokens of a sample, if sizes are in samples and the reference is in tokens."""

    def __post_init__(self) -> None:
        fill(self, reference=checked_size(self.reference, "the reference of a rule"))

    @abstractmethod
    def __call__(self, size: int, /) -> float:
        """Return the factor for a decided size."""

    def moved(self, value: float, size: int) -> float:
        """Return a value for batches of a decided size; by default, the value times the factor."""
        return value * self(size)

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


@knows_foreign
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


@knows_foreign
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


@final
@dataclass(frozen=True, slots=True)
class HalfLifeRule(Referenced):
    """Keeps the half-life of an average constant in samples or tokens; for `betas.1`.

    Formula: `value ** (size / reference)`. Source: Marek et al. 2025 (arXiv 2507.07101), which
    keeps the half-life of Adam's second moment in tokens.

    >>> HalfLifeRule(256).moved(0.81, 128)
    0.9

    Args:
        reference: the batch size for which the value was chosen: 256, or `"4Mtok"`.

    Raises:
        BatchSizeError: the reference is neither an integer of at least 1 nor tokens; in a run, the
            value is not from 0 to 1.
    """

    is_of_averages = True

    def __call__(self, size: int, /) -> float:
        """Return the power: `size / reference`."""
        return self.ratio(size)

    def moved(self, value: float, size: int) -> float:
        """Return the value for batches of a decided size."""
        if not 0 <= value <= 1:
            why, instead = "it is not from 0 to 1", "use it for an average such as 'betas.1'"
            raise BatchSizeError.cannot(f"keep the half-life of {value}", why=why, instead=instead)
        return float(value ** self(size))


RULES: Mapping[str, Callable[[Any], Rule]] = {
    "linear": LinearRule,
    "sqrt": SquareRootRule,
    "half_life": HalfLifeRule,
}
"""The rules that a mapping can name."""


def as_rule(rule: RuleLike) -> Rule:
    """Return the rule that `rule` describes, as in a run file or as a function.

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
    if callable(value) and not isinstance(value, type):
        return value
    why = f"it is not exactly one of {', '.join(RULES)}, with the size that the value is meant for"
    instead = "write {'linear': 256}, {'sqrt': 256} or a function size -> factor"
    raise BatchSizeError.bad("rule", value, why, instead)


_NO_AVERAGES = ("lr", "weight_decay", "eps")


def as_rules(rules: RuleLike | None) -> dict[str, Rule]:
    """Return rules by the name of what follows the batch size; one alone is that of `lr`.

    >>> as_rules({"sqrt": 256}), as_rules({"betas.1": {"half_life": 256}})
    ({'lr': SquareRootRule(reference=256)}, {'betas.1': HalfLifeRule(reference=256)})

    Raises:
        BatchSizeError: there is no such rule, or it is of no use for what it is given to.
        ScheduleError: a name is not that of a hyper-parameter.
    """
    is_named = isinstance(rules, Mapping) and RULES.keys().isdisjoint(rules)
    named = rules if is_named or rules is None else {"lr": rules}
    found = {name: as_rule(rule) for name, rule in (named or {}).items()}  # type: ignore[union-attr]
    for name, rule in found.items():
        is_average = parse_name(name).key not in _NO_AVERAGES
        if isinstance(rule, Referenced) and rule.is_of_averages and not is_average:
            why, instead = "it is no average", "use it for an average such as 'betas.1'"
            raise BatchSizeError.cannot(f"keep the half-life of {name}", why=why, instead=instead)
    return found


def moved(rule: Rule | None, value: float, size: int) -> float:
    """Return a value as a rule has it for batches of a decided size.

    >>> moved(SquareRootRule(256), 0.1, 1024), moved(lambda size: 0.5, 0.1, 1024)
    (0.2, 0.05)

    Raises:
        ScheduleError: a function does not return a factor.
    """
    if rule is None:
        return value
    if isinstance(rule, Referenced):
        return rule.moved(value, size)
    return value * checked_factor(rule(size), rule)
