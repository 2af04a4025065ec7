"""Names of modules, from hooks: only for a second run.

Hooks can change what is compiled, and so the number.
"""

from __future__ import annotations

import time
from typing import Any


def follow(spans: list[tuple[int, str]]) -> None:
    """Append a time and the name of the innermost module whenever that module changes.

    In backward, a module is entered at the node that made its output.
    """
    import torch
    from torch.nn.modules import module as modules

    names: dict[int, str] = {}
    stack: list[str] = []

    def enter(module: Any, args: Any) -> None:
        del args
        if not stack and id(module) not in names:
            top = type(module).__name__
            names.update({id(one): name or top for name, one in module.named_modules()})
        stack.append(names.get(id(module), type(module).__name__))
        change(stack[-1])

    def change(name: str) -> None:
        spans.append((time.time_ns() // 1000, name))

    def leave(module: Any, args: Any, output: Any) -> None:
        del module, args
        name = stack.pop() if stack else ""
        for tensor in output if isinstance(output, tuple | list) else [output]:
            node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is not None and "phantomgpu" not in node.metadata:  # the innermost module's
                node.metadata["phantomgpu"] = name
                node.register_prehook(lambda _: change(name))
        change(stack[-1] if stack else "")

    modules.register_module_forward_pre_hook(enter)
    modules.register_module_forward_hook(leave, always_call=True)
