"""One rank of many in one process, the script unchanged."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from typing import Any

import torch
from torch import distributed

from phantomgpu.values import leaves

_KEPT: list[object] = []
_COLLECTIVES = (
    "allreduce_ allreduce_coalesced_ broadcast_ reduce_ allgather_ _allgather_base_ "
    "allgather_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_ _reduce_scatter_base_ "
    "reduce_scatter_tensor_coalesced_ gather_ scatter_ alltoall_ alltoall_base_ barrier send recv_ "
    "recv_any_source_ monitored_barrier_"
)


def _inner(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.inner, name)(*args)


class _Store(distributed.Store):  # type: ignore[name-defined,misc]
    """The store of all ranks: the others have written what NCCL and gloo need to connect."""

    set, add, check, delete_key = map(_inner, ("set", "add", "check", "delete_key"))

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = distributed.HashStore()  # type: ignore[attr-defined]

    def get(self, key: str) -> Any:
        """Return a value; of another rank, NCCL's identifier of a communicator."""
        if self.inner.check([key]):
            return self.inner.get(key)
        if "//" in key:  # of a process group
            return b"\7" * 128
        raise RuntimeError(f"cannot know what another rank writes to the store under {key!r}")

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """Do not wait: nobody comes."""

    def clone(self) -> _Store:
        """Return what another thread uses."""
        return self


def start() -> None:
    """Play the part of torchrun: a store that a script's `init_process_group` joins.

    The stand-in NCCL needs no other rank. Gloo connects to the others only when it is used, and
    its collectives are answered here.
    """
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return  # a process that the script started
    if not _KEPT:
        ours = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name in _COLLECTIVES.split():
                ours.impl(name, _answer(getattr(torch.ops.c10d, name).default), "CPU")
        _KEPT.append(ours)
    store = _Store()
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # `distributed` has a function
    rendezvous.TCPStore = lambda **_: store
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "phantomgpu",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_GLOO_LAZY_INIT": "1",
    }


def stop() -> None:
    """Forget the store before a fork; each fork starts its own."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _answer(operation: Any) -> Callable[..., Any]:
    """Return a collective of tensors on the CPU in which all ranks hold what this one holds."""
    from torch._C._distributed_c10d import FakeWork

    def collective(*args: Any, **kwargs: Any) -> Any:
        del kwargs
        sources = leaves(args[1])
        for to, source in zip(leaves(args[0]), cycle(sources)) if sources else ():
            if to.numel() and source.numel():
                values = source.flatten().repeat(-(-to.numel() // source.numel()))
                to.copy_(values[: to.numel()].view_as(to))
        work = FakeWork().boxed()
        returned = len(operation._schema.returns)
        return (args[0], work) if returned == 2 else work if returned else None

    return collective
