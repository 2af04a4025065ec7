"""Finds the modules that an algorithm changes, by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from stretto.errors import TrainingError

_SHOWN = 8
"""Names listed in a message."""


def find_modules(model: nn.Module, names: Sequence[str], what: str) -> list[nn.Module]:
    """Return the modules of `model` that have these names; `what` says what for.

    >>> find_modules(nn.Sequential(nn.Identity()), ["0"], "freeze")
    [Identity()]

    Raises:
        TrainingError: the model has no module of a name.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            known = [repr(other) for other in modules if other]
            more = ", ..." if len(known) > _SHOWN else ""
            raise TrainingError.cannot(
                f"{what} {name!r}",
                why="the model has no such module",
                instead=f"write {', '.join(known[:_SHOWN])}{more}"
                if known
                else "leave it out: this model has no parts",
            )
    return [modules[name] for name in names]
