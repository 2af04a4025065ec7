"""Several optimizers as one, to read and set hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch.optim import Optimizer


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return a single optimizer itself, or one with the parameter groups of several.

    >>> import torch
    >>> one, two = (torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (0.1, 0.2))
    >>> joined([one]) is one, [group["lr"] for group in joined([one, two]).param_groups]
    (True, [0.1, 0.2])
    """
    return optimizers[0] if len(optimizers) == 1 else Joined(optimizers)


def each_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers behind a joined one; or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, Joined) else (optimizer,)


@final
class Joined(Optimizer):
    """The parameter groups of several optimizers, in order; made by `joined`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Do not call super().__init__: it has no state of its own.
        self.optimizers = tuple(optimizers)
        self.defaults: dict[str, Any] = {}
        for one in optimizers:
            self.defaults |= one.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The present groups of all optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]

    def __repr__(self) -> str:
        return f"joined({list(self.optimizers)!r})"
