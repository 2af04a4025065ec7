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
    def watching(self, model: nn.Module, *, in_compiled: bool = True) -> Iterator[None]:
        """Watch the modules of `model`.

        Args:
            model: what runs.
            in_compiled: whether those that are compiled run as if they were not; else they stay
                without hooks, which would break what is compiled to pieces.
        """
        hooks = []
        compiled = set() if in_compiled else compiled_modules(model)
        for name, module in model.named_modules():
            if module in compiled:
                continue
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
            if not torch.compiler.is_compiling():  # a compiled function may call modules
                self._stack.append(path)
                self._note()

        return enter

    def _leaving(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        if torch.compiler.is_compiling():
            return
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


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that run as compiled code: what `torch.compile` was given, and inside it.

    >>> model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
    >>> model[0].compile(backend="eager")
    >>> len(compiled_modules(model))
    2
    """
    found: set[nn.Module] = set()
    for module in model.modules():
        # Of `torch.compile(module)` what it wraps; `module.compile()` compiles the module itself.
        inner = module._modules.get("_orig_mod")
        if inner is None and module._compiled_call_impl is not None:
            inner = module
        if inner is not None:
            found.update(inner.modules())
    return found
