"""What torch before 2.8 does itself: it marks tensors of collectives as used on NCCL's stream.

So their memory is not free before the device has got that far. Newer torch holds the tensors of
asynchronous collectives instead, until the program waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, distributed

STREAM = torch.cuda.Stream()
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "broadcast")


def marking(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that marks its tensors."""

    @wraps(collective)
    def run(*tensors: Any, **settings: Any) -> Any:
        work = collective(*tensors, **settings)
        for one in tensors:
            if isinstance(one, Tensor):
                one.record_stream(STREAM)
        return work

    return run


for name in COLLECTIVES:
    setattr(distributed, name, marking(getattr(distributed, name)))
