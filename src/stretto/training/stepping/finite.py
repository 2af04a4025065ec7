"""Checks that the losses and the gradient of a step are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import isfinite
from typing import final

import torch
from torch import Tensor, nn

from stretto.errors import Argument, TrainingError
from stretto.timing import Timestamp
from stretto.training.checkpointing.records import count

MOST_IN_A_ROW = 20
"""Skipped steps in a row after which the run ends with an error."""


@final
class FiniteCheck:
    """Checks the losses and the gradient of a step on this rank.

    One pass over the gradient, and one number read from the device.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, float("inf")])
    >>> FiniteCheck([weight]).passes([torch.tensor(0.5)])
    False

    Args:
        parameters: those whose gradients are checked.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        # The kernel takes float32 alone, whatever the default type is.
        scalar = partial(torch.full, (1,), dtype=torch.float32)
        self._groups = [
            (group, scalar(fill_value=0.0, device=device), scalar(fill_value=1.0, device=device))
            for (device, _), group in groups.items()
        ]
        everything = [parameter for group in groups.values() for parameter in group]
        self._is_plain = not any(p.is_complex() or hasattr(p, "to_local") for p in everything)

    def passes(self, losses: Iterable[Tensor], *, is_gradient_known: bool = False) -> bool:
        """Return whether every loss and every element of the gradient is finite.

        Args:
            losses: scalars.
            is_gradient_known: whether the gradient is known to be finite.
        """
        groups = () if is_gradient_known else self._groups
        for parameters, flag, one in groups:
            gradients = [grad for p in parameters if (grad := p.grad) is not None]
            if not gradients:
                continue
            if self._is_plain:
                try:
                    _mark_infinite(gradients, flag, one)
                    continue
                except NotImplementedError:
                    pass  # one of them is sparse
            _mark_infinite([_local(gradient) for gradient in gradients], flag, one)
        # Read only now: reading waits for the device.
        are_finite = True
        for loss in losses:
            are_finite &= isfinite(loss.item())
        for _, flag, _ in groups:
            if flag.item():
                flag.zero_()
                are_finite = False
        return are_finite


@final
class SkippedSteps:
    """Counts skipped steps.

    >>> skipped = SkippedSteps()
    >>> skipped.add(Timestamp())
    >>> skipped.count
    1
    """

    def __init__(self) -> None:
        self.count = 0
        self.in_a_row = 0
        """Those since the last step that was not skipped."""

    def add(self, at: Timestamp) -> None:
        """Count the step that begins at `at`.

        Raises:
            TrainingError: too many steps in a row were skipped.
        """
        self.count += 1
        self.in_a_row += 1
        if self.in_a_row >= MOST_IN_A_ROW:
            self.in_a_row = 0
            raise TrainingError.cannot(
                f"continue after {at.get('sp')}",
                why=f"{MOST_IN_A_ROW} steps in a row had a loss or gradient that is nan or "
                "infinite",
                instead="resume from an earlier checkpoint with a lower learning rate or "
                "clip_norm=1.0",
            )

    def end_row(self) -> None:
        """Note that a step was not skipped."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"count": self.count, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counts."""
        self.count, self.in_a_row = count(state, "count"), count(state, "in_a_row")


def not_finite(at: Timestamp) -> TrainingError:
    """Return the error for a step that is not finite."""
    return TrainingError.cannot(
        f"take the step at {at.get('sp')}",
        why="its loss or gradient is nan or infinite; the weights are still those before it",
        instead=(
            "lower the learning rate, clip with ",
            Argument("clip_norm", 1.0),
            ", or skip such steps with ",
            Argument("non_finite", "skip"),
        ),
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
