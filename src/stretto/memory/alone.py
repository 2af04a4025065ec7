"""Steps of a sharded model on one rank alone: no collective waits for the other ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast, final

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import FitError
from stretto.runtime.compiled import uncompiled
from stretto.runtime.sharded import is_fully_sharded


def alone(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a rank runs steps of a sharded model, of any size, without others.

    What other ranks would send is taken from the rank's own part, into the same memory. So the
    steps allocate what they do in a run, and their results mean nothing.

    Raises:
        FitError: the model cannot go on after a step that has failed; or, from a step: it
            communicates in another way than FSDP2 does.
    """
    if not any(map(is_fully_sharded, model.modules())):
        return nullcontext()
    if not hasattr(uncompiled(model), "reset_iter_state"):
        raise _refused("only FSDP2 of the whole model can go on after a failure, since torch 2.13")
    return _Alone()  # type: ignore[no-untyped-call]


def recover(model: nn.Module) -> None:
    """Put a sharded model back to where a step begins, after one that has failed."""
    if is_fully_sharded(model):
        cast(Any, uncompiled(model)).reset_iter_state()


@final
class _Alone(TorchDispatchMode):
    """Answers collectives from the rank's own part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # the parts of a DTensor come next
        name = func.overloadpacket.__name__
        if func.namespace not in ("c10d", "_c10d_functional") or name in _QUIET:
            return func(*args, **(kwargs or {}))
        if name == "all_reduce":  # of the norm of a gradient
            return args[0].clone()
        if name == "_allgather_base_":
            whole, own = args[:2]
            for part in whole.view(-1, *own.shape):
                if part.data_ptr() != own.data_ptr():  # its own is there already
                    part.copy_(own)
        elif name == "_reduce_scatter_base_":
            own, whole = args[:2]
            own.copy_(whole.reshape(-1)[: own.numel()].view_as(own))
        elif name != "allreduce_":
            raise _refused(f"its step calls {name.strip('_')}, which waits for the other ranks")
        from torch._C._distributed_c10d import FakeWork  # which torch's own test backend returns

        return args[0], FakeWork().boxed()


_QUIET = ("wait_tensor", "_wrap_tensor_autograd")


def _refused(why: str) -> FitError:
    what = "try batch sizes with a model that is sharded over ranks"
    instead = "ask the phantom: gpu=..., world_size=..., with the model before it is sharded"
    return FitError.cannot(what, why=why, instead=instead)
