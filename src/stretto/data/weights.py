"""What a loss is a mean over, and the factors of the losses of micro-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

from stretto.data import Step, count_target_tokens
from stretto.data.containers import mapped
from stretto.data.tokens import compare_labels
from stretto.errors import TrainingError
from stretto.runtime.ranks import Ranks
from stretto.schedules.fields import one_of

Units: TypeAlias = Literal["samples", "tokens"] | Callable[[Any], int]
"""What a loss is a mean over: samples, target tokens, or what a function counts in a batch."""
UnitCounter: TypeAlias = Callable[[Any], int] | None
"""Counts the units of a batch; None: they are its samples."""


def unit_counter(units: Units, *, shifts_labels: bool | None = None) -> UnitCounter:
    """Return what counts these units; for `shifts_labels`, see `Stepping.shifts_labels`.

    Raises:
        TrainingError: there are no such units.
    """
    if callable(units) and not isinstance(units, type):
        return partial(_counted, units)
    one_of(units, "units", ("samples", "tokens"), TrainingError)
    return TargetTokens(shifts_labels=shifts_labels) if units == "tokens" else None


def _counted(count: Callable[[Any], int], batch: Any) -> int:
    """Return what a user's function counts, if it is a count."""
    found: object = count(batch)
    if not isinstance(found, (int, float)) and hasattr(found, "item"):
        with suppress(ValueError, RuntimeError):  # it has several elements
            found = found.item()
    if not isinstance(found, (int, float)) or not 0 <= found < math.inf:
        raise TrainingError.bad(
            "loss_weight", found, "it is not a count", "return the units of the batch"
        )
    return cast(int, found)  # a sum of weights need not be whole


_ENOUGH = 32
"""Targets that are not all their inputs by chance, as single ones of a masked model may be."""


@final
class TargetTokens:
    """Counts target tokens; the first labels show whether the model shifts them.

    One label that is not its input shows that it does not. Labels that all are their inputs show
    that it does, if there are enough of them; until then, later ones must agree.

    >>> import torch
    >>> labels = torch.tensor([[5, 6, 7]])
    >>> TargetTokens(shifts_labels=None)({"input_ids": labels, "labels": labels})
    2

    Args:
        shifts_labels: see `Stepping.shifts_labels`.
    """

    def __init__(self, *, shifts_labels: bool | None) -> None:
        self._said, self._shifts = shifts_labels, shifts_labels
        self._num_same = 0
        """Targets so far that are all their inputs."""
        self.is_open = True
        """Whether more labels are looked at."""
        self._is_shared = False

    def __call__(self, batch: Any) -> int:
        """Return the target tokens of a batch.

        Raises:
            TrainingError: labels were the inputs in few earlier targets, and these are not.
        """
        if self.is_open and not self._is_shared:
            self._learn(compare_labels(batch))
        return count_target_tokens(batch, shifts_labels=self._shifts is not False)

    def look(self, batches: Iterable[Any], ranks: Ranks) -> None:
        """Look at the labels of a step on all ranks, which must all call it while `is_open`.

        Raises:
            TrainingError: labels were the inputs in few earlier targets, and these are not.
        """
        self._is_shared = True
        each = [compare_labels(batch) for batch in batches]
        own = [sum(one[at] for one in each) for at in range(3)]
        shared = ranks.agree(own) if ranks.dp_world_size > 1 and ranks.world_size > 1 else own
        self._learn([int(one) for one in shared])
        # Labels of another shape than the inputs, as of a decoder, are never shifted.
        self.is_open &= bool(shared[0])

    def _learn(self, found: Sequence[int]) -> None:
        """Decide from targets, those that are not their input, and those that are not the next."""
        num_targets, num_other, num_moved = found
        if num_other and self._num_same and self._said is None:
            raise TrainingError.cannot(
                "count the target tokens",
                why=f"the first {self._num_same} labels are their inputs, as if the model shifted "
                "them, and later ones are not",
                instead="write shifts_labels=False if the model predicts each label from its own "
                "place, else shifts_labels=True; or count them by a function",
            )
        needs_shift = not num_other
        if not num_targets or (needs_shift and not num_moved):
            return  # none, or both as of a single token
        self._num_same += num_targets if needs_shift else 0
        self.is_open = needs_shift and self._num_same < _ENOUGH and self._said is None
        if self._said is None:
            self._shifts = needs_shift
        elif self._said != needs_shift:
            warnings.warn(
                f"shifts_labels={self._said}, but the labels are "
                f"{'' if needs_shift else 'not '}the input_ids; if the model shifts them "
                f"{'nowhere, it learns to copy' if needs_shift else 'too, it learns others'}: "
                f"write shifts_labels={needs_shift}",
                RuntimeWarning,
                stacklevel=3,
            )


def nothing_to_learn(step: Step) -> TrainingError:
    """Return the error for a step without units."""
    return TrainingError.cannot(
        f"compute the step at {step.timestamp.get('sp')}",
        why="its batch has no units, such as target tokens, to weight the loss by",
        instead="give labels other than -100, or weight the loss by samples",
    )


class MicroBatchView(NamedTuple):
    """A micro-batch as a loop sees it that takes one micro-batch after the other."""

    batch: Any
    """The collated samples."""
    weight: float
    """The factor of its mean loss; 0 for a dummy."""
    is_first: bool
    """Whether a step begins with it."""
    is_last: bool
    """Whether the optimizer steps after it."""


def units_of(step: Step, count: UnitCounter, ranks: Ranks) -> tuple[list[int], float]:
    """Return the units of each micro-batch, and those of the step over all ranks.

    Dummies have none. Unless units are samples, ranks add them up, so all must call it.

    Args:
        step: the step.
        count: counts the units of a batch.
        ranks: those that share the step.

    Raises:
        TrainingError: the batch has no unit, or the ranks are not connected.
    """
    if count is None:
        return [micro.num_samples for micro in step.micro_batches], float(step.num_samples)
    if isinstance(count, TargetTokens) and count.is_open:
        count.look((micro.batch for micro in step.micro_batches if micro.num_samples), ranks)
    own = [count(micro.batch) if micro.num_samples else 0 for micro in step.micro_batches]
    total = float(sum(own))
    if ranks.dp_world_size > 1:
        if ranks.world_size == 1:
            why, instead = "torch.distributed is not started", "call init_process_group() first"
            raise TrainingError.cannot("count the units of all ranks", why=why, instead=instead)
        # Several processes may hold parts of one model, and then have the same batches.
        total = ranks.agree([total])[0] * ranks.dp_world_size / ranks.world_size
    if not total:
        raise nothing_to_learn(step)
    return own, total


@final
class LossWeights:
    """Sets the weights of micro-batches for a loss that is a mean over other units than samples.

    Args:
        count: counts the units of a batch; None: they are samples, and nothing is set.
    """

    def __init__(self, count: UnitCounter) -> None:
        self.count = count
        self._spare: Any = None

    def set(self, step: Step, ranks: Ranks) -> None:
        """Set those of a step; all ranks must call it.

        The mean loss over no units is nan, and 0 * nan is, too. So a micro-batch without units
        gets the batch of another one, or of an earlier step.

        Raises:
            TrainingError: the batch has no unit.
        """
        own, total = units_of(step, self.count, ranks)
        for micro, units in zip(step.micro_batches, own, strict=True):
            micro.weight = units * ranks.dp_world_size / total
        used = next((one.batch for one in step.micro_batches if one.weight), self._spare)
        self._spare = copied(used)
        for micro in step.micro_batches:
            if not micro.weight and used is not None:
                micro.batch = copied(used)


def copied(batch: Any) -> Any:
    """Return a batch of the same tensors: a loop may take parts out of its containers."""
    return mapped(lambda tensor: tensor, batch)
