"""Sees whether a loss is a sum over the samples, from how it was computed."""

from __future__ import annotations

from torch import Tensor

_SUM = 2
"""The number of `reduction="sum"` in torch's criteria."""


def is_sum(loss: Tensor, num_samples: int) -> bool:
    """Return whether a loss is a sum over the samples. It reads no values and calls nothing again.

    What was divided later may be a mean, so it is none.

    >>> import torch
    >>> x = torch.ones(4, 3, requires_grad=True)
    >>> is_sum(x.square().sum(), 4), is_sum(x.square().mean(), 4), is_sum(x.sum() / 12, 4)
    (True, False, False)
    """
    root = loss.grad_fn
    if root is None:
        return False
    if root.name().startswith("SumBackward"):
        sizes, inner = root._saved_self_sym_sizes, root.next_functions[0][0]  # type: ignore[attr-defined]
        is_list = inner is not None and inner.name() in ("StackBackward0", "CatBackward0")
        return bool(sizes) and sizes[0] % num_samples == 0 and not is_list
    nodes = [root]
    for node in nodes:
        if node.name() == "AddBackward0":
            nodes += [one for one, _ in node.next_functions if one is not None]
    return any(getattr(node, "_saved_reduction", None) == _SUM for node in nodes)
