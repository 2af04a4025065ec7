"""What torch before 2.8 does itself: it marks tensors of collectives as used on NCCL's stream.

So their memory is not free before the device has got that far. Newer torch holds the tensors of
asynchronous collectives instead, until the program waits, which it does here at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, distributed

STREAM = torch.cuda.Stream()
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_reduce broadcast reduce_scatter reduce_scatter_tensor"
)


def marking(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that marks its tensors, and holds none of them."""

    @wraps(collective)
    def run(*given: Any, **settings: Any) -> Any:
        work = collective(*given, **settings)
        if work is not None:
            work.wait()
        for one in given:
            for tensor in one if isinstance(one, list) else [one]:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(STREAM)
        return work

    return run


for name in COLLECTIVES.split():
    setattr(distributed, name, marking(getattr(distributed, name)))
