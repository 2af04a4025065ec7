"""What a loss must be to learn from it."""

from __future__ import annotations

from torch import Tensor

from stretto.data import Step
from stretto.errors import TrainingError, cannot


def nothing_to_learn(step: Step) -> TrainingError:
    """Return the error for a step without a unit."""
    return TrainingError(
        cannot(
            f"take the step at {step.timestamp.get('sp')}",
            why="its batch has nothing to weigh the loss by, such as target tokens",
            instead="give labels other than -100, or weigh by samples",
        )
    )


def scalar(loss: object) -> Tensor:
    """Return the loss, if it is one.

    Raises:
        TrainingError: it is no scalar tensor.
    """
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    shape = list(loss.shape) if isinstance(loss, Tensor) else None
    raise TrainingError(
        cannot(
            f"learn from a loss of type {type(loss).__name__}",
            why="it is no tensor" if shape is None else f"its shape is {shape}",
            instead="return a scalar tensor, such as losses.mean()",
        )
    )
