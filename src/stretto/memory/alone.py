"""Steps of a sharded model on one rank alone: no collective waits for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import FitError
from stretto.runtime.compiled import uncompiled
from stretto.runtime.sharded import is_fully_sharded


@contextmanager
def alone(model: nn.Module) -> Iterator[AbstractContextManager[object]]:
    """Yield a context in which a rank runs steps of a sharded model, of any size, without others.

    What other ranks would send is taken from the rank's own part, into the same memory. So the
    steps allocate what they do in a run, and their results mean nothing.

    Raises:
        FitError: the model cannot go on after a step that has failed; or, from a step: it
            communicates in another way than FSDP2 does.
    """
    if not any(map(is_fully_sharded, model.modules())):
        yield nullcontext()
        return
    if not hasattr(uncompiled(model), "reset_iter_state"):
        raise _refused("only FSDP2 of the whole model can go on after a failure, since torch 2.13")
    group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        yield _Alone(group.boxed())
    finally:
        dist.destroy_process_group(group)


def recover(model: nn.Module) -> None:
    """Put a sharded model back to where a step begins, after one that has failed."""
    if is_fully_sharded(model):
        cast(Any, uncompiled(model)).reset_iter_state()


@final
class _Alone(TorchDispatchMode):
    """Answers collectives from the rank's own part, with work of a group of this rank."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # the parts of a DTensor come next
        name = func.overloadpacket.__name__
        if func.namespace not in ("c10d", "_c10d_functional") or name in _QUIET:
            return func(*args, **(kwargs or {}))
        if name in _VALUES:
            return _VALUES[name](*args)
        names = [one.name for one in func._schema.arguments]
        given = dict(zip(names, args, strict=False), **(kwargs or {}), process_group=self._group)
        if name == "_allgather_base_":
            own, whole = given["input_tensor"], given["output_tensor"]
            rows = whole.view(-1, *own.shape)  # the rank's own part may be one of them already
            for row in rows:
                if row.data_ptr() != own.data_ptr():
                    row.copy_(own)
            return whole, func(**{**given, "output_tensor": rows[0]})[1]
        if name == "_reduce_scatter_base_":
            own = given["output_tensor"]
            given["input_tensor"] = given["input_tensor"].reshape(-1)[: own.numel()].view_as(own)
        elif name != "allreduce_":
            raise _refused(f"its step calls {name.strip('_')}, which waits for the other ranks")
        return func(**given)


_QUIET = ("wait_tensor", "_wrap_tensor_autograd")
_VALUES: dict[str, Callable[..., Tensor]] = {
    "all_reduce": lambda own, *_: own.clone(),
    "all_gather_into_tensor": lambda own, size, _: own.repeat(size, *[1] * (own.dim() - 1)),
    "reduce_scatter_tensor": lambda own, _, size, __: own.chunk(size)[0].clone(),
}
"""What a collective that is a value would be if all ranks had the same."""


def _refused(why: str) -> FitError:
    return FitError.cannot(
        "try batch sizes with a model that is sharded over ranks",
        why=why,
        instead="ask the phantom: gpu=..., world_size=..., with the model before it is sharded",
    )
