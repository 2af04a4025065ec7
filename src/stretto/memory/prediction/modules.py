"""Track the running module: by hooks in forward, by the autograd graph in backward."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn


@final
class ModuleWatch:
    """Tracks the path of the module that is running.

    Autograd nodes have sequence numbers in the order of their creation. The numbers at which
    modules are entered and left show in which forward pass a node was created.
    """

    def __init__(self) -> None:
        self._stack: list[str] = [""]
        self._numbers: list[int] = [-1]
        self._paths: list[str] = [""]

    def path(self) -> str:
        """Return the path of the running module; empty outside of all modules."""
        node: Any = torch._C._current_autograd_node()
        if node is None or len(self._stack) > 1:
            return self._stack[-1]
        return self.of_node(node._sequence_nr())

    def of_node(self, number: int) -> str:
        """Return the path of the module whose forward pass created an autograd node."""
        if number >= 1 << 62:  # nodes that accumulate gradients have no number
            return ""
        return self._paths[bisect.bisect_right(self._numbers, number) - 1]

    @contextlib.contextmanager
    def watching(self, model: nn.Module, *, in_compiled: bool = True) -> Iterator[None]:
        """Watch the modules of `model`.

        Args:
            model: the model.
            in_compiled: whether compiled modules run eagerly. If not, they get no hooks, because
                hooks cause graph breaks.
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
    """Return the modules that run as compiled code, with their submodules.

    >>> model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
    >>> model[0].compile(backend="eager")
    >>> len(compiled_modules(model))
    2
    """
    found: set[nn.Module] = set()
    for module in model.modules():
        # `torch.compile(module)` wraps a module; `module.compile()` compiles it in place.
        inner = module._modules.get("_orig_mod")
        if inner is None and module._compiled_call_impl is not None:
            inner = module
        if inner is not None:
            found.update(inner.modules())
    return found
