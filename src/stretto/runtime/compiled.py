"""Models that `torch.compile` has wrapped, wholly or in part: what they wrap, and plain names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from torch import Tensor, nn

_INNER: Final = "_orig_mod"


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` has wrapped a module.

    >>> is_compiled(nn.Linear(1, 1))
    False
    """
    # If it is not imported, nothing is compiled; importing it takes seconds.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped, or else the module itself."""
    inner: nn.Module = getattr(module, _INNER) if is_compiled(module) else module
    return inner


def plain_naming(model: nn.Module) -> Callable[[str], str]:
    """Return a function from a name in a model to that in the model that is not compiled.

    >>> plain_naming(nn.Linear(1, 1))("weight")
    'weight'
    """
    wrapped = [
        name for name, module in model.named_modules(remove_duplicate=False) if is_compiled(module)
    ]

    def plain(name: str) -> str:
        for outer in reversed(wrapped):  # those inside first
            inner = f"{outer}.{_INNER}".removeprefix(".")
            if name == inner or name.startswith(f"{inner}."):
                rest = name[len(inner) + 1 :]
                name = ".".join(part for part in (outer, rest) if part)
        return name

    return plain


def plain_state(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model by plain names."""
    plain = plain_naming(model)
    return {plain(name): value for name, value in model.state_dict().items()}


def known_as(name: str, names: Mapping[str, Any]) -> str:
    """Return a saved name as it is among `names`, if it was saved from a compiled model.

    >>> known_as("_orig_mod.weight", {"weight": 0}), known_as("bias", {"weight": 0})
    ('weight', 'bias')
    """
    plain = name if name in names else name.replace(f"{_INNER}.", "")
    return plain if plain in names else name


@final
class Weights:
    """The state of a model by plain names, whether it is compiled or not, now or when saved.

    >>> model = nn.Linear(1, 1)
    >>> Weights(model).load_state_dict({"weight": model.weight, "_orig_mod.bias": model.bias})
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state."""
        return plain_state(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, of which the model must have every name and no other.

        Raises:
            RuntimeError: names or shapes are others.
        """
        plain = plain_naming(self._model)
        own = {plain(name): name for name in self._model.state_dict()}
        named = {known_as(name, own): value for name, value in state.items()}
        self._model.load_state_dict({own.get(name, name): value for name, value in named.items()})
