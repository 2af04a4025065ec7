"""The result of a step, and checks that its losses and gradient are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from stretto.distributed.logged import MicroLoss
from stretto.errors import Argument, TrainingError
from stretto.timing import Timestamp

_GRADIENT, _IS_GIVEN = attrgetter("grad"), partial(is_not, None)


class Gradient(NamedTuple):
    """The result of one step on this rank; the gradient itself is in the parameters."""

    losses: list[MicroLoss]
    units: int
    """Units of this rank if they are summed over ranks later; otherwise 0."""
    tokens: int | None
    """Tokens of this rank if a callback changed the batches; None: the loader has counted them."""
    num_micro_batches: int
    """Micro-batches of this rank; more than the loader made if memory ran out."""


class _Flag(NamedTuple):
    """Whether anything on a device was not finite: 0 or 1, in float32 as the kernel wants it."""

    value: Tensor
    one: Tensor
    host: Tensor
    """Where the host reads it: itself on a CPU, else a copy that is made without waiting."""
    seen: Any
    """The same memory as a NumPy array, which is read without an operation of torch."""

    @classmethod
    def on(cls, device: torch.device) -> _Flag:
        value = torch.zeros(1, dtype=torch.float32, device=device)
        pins = device.type == "cuda"
        host = value if device.type == "cpu" else torch.zeros(1, pin_memory=pins)
        return cls(value, torch.ones_like(value), host, host.numpy())


@final
class FiniteCheck:
    """Checks the losses and the gradient of a step on this rank.

    The host waits for no device if `is_late`: then a step that is not finite is found one or more
    steps later, at the latest by `settle`. On a CPU it is always found at once.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, float("inf")])
    >>> FiniteCheck([weight]).passes([torch.tensor(0.5)])
    False

    Args:
        parameters: those whose gradients are checked.
        is_late: whether a step may be found not to be finite after the weights have changed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, is_late: bool = False) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        self._is_plain = True
        """Whether gradients are dense and real, as far as known before the first pass."""
        for one in parameters:
            groups.setdefault((one.device, one.dtype), []).append(one)
            self._is_plain &= not (one.is_complex() or hasattr(one, "to_local"))
        self._groups = list(groups.items())
        self._flags: dict[torch.device, _Flag] = {}
        self.is_late = is_late
        self._waits = False
        """Whether the host has to wait for a device: results are needed in each step."""

    def passes(self, losses: list[Tensor], *, is_gradient_known: bool = False) -> bool:
        """Return whether every loss and every element of the gradient is finite.

        Args:
            losses: scalars.
            is_gradient_known: whether the gradient is known to be finite.
        """
        found = torch.stack(losses) if losses else None  # a copy: the kernel multiplies by one
        checked: list[tuple[torch.device, list[Tensor]]] = []
        for place, parameters in () if is_gradient_known else self._groups:
            tensors = list(filter(_IS_GIVEN, map(_GRADIENT, parameters)))
            if found is not None and (found.device, found.dtype) == place:
                tensors.append(found)
                found = None
            checked.append((place[0], tensors))
        if found is not None:
            checked.append((found.device, [found]))
        for device, tensors in checked:
            if not tensors:
                continue
            flag = self._flags.get(device) or self._flag(device)
            if self._is_plain:
                try:
                    _mark_infinite(tensors, flag.value, flag.one)
                    continue
                except NotImplementedError:
                    pass  # one of them is sparse
            _mark_infinite([_local(tensor) for tensor in tensors], flag.value, flag.one)
        are_finite = True
        for flag in self._flags.values():
            if flag.host is not flag.value:
                flag.host.copy_(flag.value, non_blocking=True)
            if flag.seen[0]:
                are_finite = False
        return self.settle() if not are_finite or self._waits else True

    def settle(self) -> bool:
        """Wait for the device; return whether all steps since the last call were finite."""
        are_finite = True
        for flag in self._flags.values():
            if flag.seen[0] if flag.host is flag.value else flag.value.item():
                flag.value.zero_()
                are_finite = False
        return are_finite

    def _flag(self, device: torch.device) -> _Flag:
        self._waits |= device.type != "cpu" and not self.is_late
        return self._flags.setdefault(device, _Flag.on(device))


def not_finite(at: Timestamp, *, is_late: bool = False) -> TrainingError:
    """Return the error for a step that is not finite, or for one before `at`."""
    where = "have changed" if is_late else "are still those before it"
    return TrainingError.cannot(
        f"train {'beyond' if is_late else 'the step at'} {at.get('sp')}",
        why=f"its loss or gradient is nan or infinite; the weights {where}",
        instead=(
            "resume from the last checkpoint, and lower the learning rate, clip with ",
            Argument("clip_norm", 1.0),
            ", or skip such steps with ",
            Argument("non_finite", "skip"),
        ),
    )


def skipped_alone(at: Timestamp, ranks: Sequence[int]) -> TrainingError:
    """Return the error for a step that only some ranks have skipped."""
    return TrainingError.cannot(
        f"continue after {at.get('sp')}",
        why=f"update() returned SKIPPED on rank {', '.join(map(str, ranks))} alone",
        instead="decide on all ranks together, and resume from the last checkpoint",
    )


# What loss scaling asks for every step, in one kernel; a scale of 1 leaves the gradient alone.
_mark_infinite = torch._amp_foreach_non_finite_check_and_unscale_


def _local(gradient: Tensor) -> Tensor:
    """Return the local part of a gradient as a dense real tensor."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    elif hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
