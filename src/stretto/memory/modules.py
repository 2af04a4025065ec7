"""Which module is running: in the forward by hooks, in the backward by the order of the graph."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn


@final
class ModuleWatch:
    """Knows the path of the module that is running.

    Each node of the autograd graph has a number that grows in the order in which nodes are made.
    So a list of the numbers at which a module was entered or left says in whose forward a node was
    made, without touching the graph.
    """

    def __init__(self) -> None:
        self._stack: list[str] = [""]
        self._numbers: list[int] = [-1]
        self._paths: list[str] = [""]

    def path(self) -> str:
        """Return the path of the module that is running; empty outside of all."""
        node: Any = torch._C._current_autograd_node()
        if node is None or len(self._stack) > 1:
            return self._stack[-1]
        return self.of_node(node._sequence_nr())

    def of_node(self, number: int) -> str:
        """Return the path of the module in whose forward a node of the graph was made."""
        if number >= 1 << 62:  # gradients are accumulated by nodes that have no number
            return ""
        return self._paths[bisect.bisect_right(self._numbers, number) - 1]

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the modules of `model`."""
        hooks = []
        for name, module in model.named_modules():
            path = name or type(module).__name__
            hooks.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
            hooks.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, path: str) -> Any:
        def enter(_module: nn.Module, _arguments: Any) -> None:
            self._stack.append(path)
            self._note()

        return enter

    def _leaving(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if number == self._numbers[-1]:
            self._paths[-1] = self._stack[-1]
        else:
            self._numbers.append(number)
            self._paths.append(self._stack[-1])
