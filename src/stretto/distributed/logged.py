"""Values since the last line of metrics, reduced over batches and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from stretto.errors import TrainingError, shown
from stretto.runtime.packing import number
from stretto.runtime.ranks import Ranks
from stretto.schedules.fields import one_of

Reduce: TypeAlias = Literal["mean", "sum", "last"]

_FOLD = 256
"""Number of tensors kept before a read, which waits for the device."""


class MicroLoss(NamedTuple):
    """The loss of one micro-batch: its sum over units is `loss * factor`, its units `weight`."""

    loss: Tensor
    factor: float
    weight: float


@final
class Logged:
    """Collects values by name, without waiting for the device.

    >>> logged = Logged()
    >>> for loss in (1.0, 2.0):
    ...     logged.add("loss_of_head", loss)
    >>> logged.add("samples_seen", 64, reduce="last")
    >>> logged.take(Ranks())
    {'loss_of_head': 1.5, 'samples_seen': 64.0}
    """

    def __init__(self) -> None:
        self._values: dict[str, Sums] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def add(
        self, name: str, value: float | Tensor, *, reduce: Reduce = "mean", weight: float = 1.0
    ) -> None:
        """Add one value.

        Raises:
            TrainingError: it is not a number, or `name` was logged with another reduction.
        """
        known = self._values.get(name)
        if known is None:
            one_of(reduce, "reduce", ("mean", "sum", "last"), TrainingError)
            known = Sums(reduce)
        _check_same(name, known.reduce, reduce)
        if isinstance(value, Tensor):
            is_number = value.numel() == 1 and not value.is_complex()
            value = value.detach().clone()  # its owner may change it
        else:
            is_number = isinstance(value, (int, float))
        if not is_number:
            kind = f"tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise TrainingError.cannot(
                f"log {shown(name)}",
                why=f"its value is a {kind}",
                instead="log a number, or a tensor of one number",
            )
        self._values[name] = known
        known.add(value, weight)

    def take(self, ranks: Ranks, *, taken: Iterable[str] = ()) -> dict[str, float]:
        """Return the values since the last call, reduced over ranks, and reset them.

        Not every rank has to log. "last" takes the value of the first rank that has logged the
        name. Every rank must call it.

        Args:
            ranks: the processes of the run.
            taken: names that are on the line already.

        Raises:
            TrainingError: a name is taken, or two ranks have logged one with different reductions.
        """
        merged = self._merged(ranks)
        for name in sorted(merged.keys() & set(taken)):
            raise TrainingError.cannot(
                f"log {shown(name)}",
                why="a line of metrics has a value of that name already",
                instead="choose another name",
            )
        self._values = {}
        return {name: sums.result() for name, sums in merged.items()}

    def state_dict(self, ranks: Ranks) -> dict[str, Sequence[str | float]]:
        """Return the values of all ranks since the last line. Every rank must call it."""
        return {name: sums.record() for name, sums in self._merged(ranks).items()}

    def load_state_dict(self, state: Mapping[str, Sequence[str | float]], ranks: Ranks) -> None:
        """Continue from saved values, which the first rank takes over for all."""
        self._values = _read(state) if ranks.is_first else {}

    def _merged(self, ranks: Ranks) -> dict[str, Sums]:
        values = self._values if ranks.is_loss_rank else {}
        own = {name: sums.record() for name, sums in values.items()}
        merged: dict[str, Sums] = {}
        for text in ranks.gather(json.dumps(own)):
            for name, other in _read(json.loads(text)).items():
                sums = merged.setdefault(name, other)
                _check_same(name, sums.reduce, other.reduce)
                if sums is not other and sums.reduce != "last":
                    sums.total += other.total
                    sums.weight += other.weight
        return merged


@final
class Sums:
    """The values of one name, or the losses: tensors are read as late as possible."""

    __slots__ = ("_pending", "reduce", "total", "weight")

    def __init__(self, reduce: Reduce = "mean", total: float = 0.0, weight: float = 0.0) -> None:
        self.reduce = reduce
        self.total, self.weight = total, weight
        self._pending: list[tuple[Tensor, float, float]] = []

    def add_losses(self, losses: Iterable[MicroLoss]) -> None:
        """Add losses without reading them."""
        self._pending += losses

    def add(self, value: float | Tensor, weight: float) -> None:
        """Add one value."""
        if self.reduce == "last":
            self.total, self._pending = 0.0, []
        if isinstance(value, Tensor):
            self._pending.append((value, weight if self.reduce == "mean" else 1.0, weight))
            if len(self._pending) == _FOLD:
                self.read()
        else:
            self.total += value * weight if self.reduce == "mean" else value
            self.weight += weight

    def record(self) -> Sequence[str | float]:
        """Return the sums as JSON."""
        self.read()
        return [self.reduce, self.total, self.weight]

    def result(self) -> float:
        """Return what the values are reduced to."""
        if self.reduce != "mean":
            return self.total
        return self.total / self.weight if self.weight else float("nan")

    def read(self) -> None:
        """Read the tensors; this waits for the device.

        They are added one by one, so the sum does not depend on how they are grouped.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        device = pending[0][0].device
        values = torch.stack([value.to(device).double().reshape(()) for value, _, _ in pending])
        for value, (_, factor, weight) in zip(values.tolist(), pending, strict=True):
            self.total += value * factor
            self.weight += weight


def _read(state: Mapping[str, Any]) -> dict[str, Sums]:
    found = {}
    for name, (reduce, total, weight) in state.items():
        one_of(reduce, "reduce", ("mean", "sum", "last"), TrainingError)
        numbers = {"total": total, "weight": weight}
        found[name] = Sums(reduce, number(numbers, "total"), number(numbers, "weight"))
    return found


def _check_same(name: str, before: str, reduce: str) -> None:
    if before != reduce:
        raise TrainingError.cannot(
            f"log {shown(name)} with reduce={reduce!r}",
            why=f"it was logged with reduce={before!r} since the last line of metrics",
            instead="choose one of the two, or another name",
        )


def mean_loss(losses: Sequence[MicroLoss]) -> float:
    """Return the mean loss of micro-batches over their units; nan without any."""
    sums = Sums()
    sums.add_losses(losses)
    sums.read()
    return sums.result()
