"""One rank of many in one process, the script unchanged.

The other ranks hold what this one holds: a sum over eight ranks is eight times its own. What they
alone know (the shape of what a stage of a pipeline gets, an object that rank 0 broadcasts) is read
from their own runs, beside this one.
"""

from __future__ import annotations

import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from phantomgpu import files
from phantomgpu.values import FEW, LOST, Bytes, Hidden, leaves

_KEPT: list[object] = []
PEERS: dict[int, None] = {}
"""The ranks that this one sends to or receives from: its neighbours in a pipeline."""
_SENT: dict[str, list[list[int]]] = {}
_READ: dict[str, int] = {}
_MOST_KEPT = 256
_CONNECTED: set[tuple[int, ...]] = set()
PAIR = 447 << 20
"""What an all-to-all adds for each other rank of a node: 3.28 GB among 8 H100, with NCCL of 2025
(github.com/NVIDIA/nccl/issues/1685). Those of other nodes share buffers and are not counted."""
_SAME = range(1, 7)
"""Reductions that give that number if all are equal: of torch's RedOpType, average to BOR."""
_COMBINED: dict[int, Callable[[torch.Tensor, int], torch.Tensor]] = {
    0: lambda values, ranks: values * ranks,
    2: lambda values, ranks: values**ranks,
    7: lambda values, ranks: values * (ranks % 2),
}
"""The other reductions: sum, product, exclusive or."""
_MESSAGES: list[Path] = []
"""The folder of what the ranks send to each other, and of which rank waits for which."""
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


def start(messages: str, bytes_of: Bytes) -> None:
    """Play the part of torchrun: a store that a script's `init_process_group` joins.

    The stand-in NCCL needs no other rank. Gloo connects to the others only when it is used, and
    its collectives are answered here.
    """
    if not _KEPT:
        _override("CPU", bytes_of)
    _MESSAGES[:] = [Path(messages)] if messages else []
    store = _Store()
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # `distributed` has a function
    rendezvous.TCPStore = lambda **_: store
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "phantomgpu"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"


def follow(bytes_of: Bytes) -> None:
    """Answer the collectives on the device, too, so that small tensors have values."""
    _override("CUDA", bytes_of)


def _override(key: str, bytes_of: Bytes) -> None:
    ours = torch.library.Library("c10d", "IMPL")
    _KEPT.append(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for name in _COLLECTIVES.split():
            operation = getattr(torch.ops.c10d, name).default
            if key == "CPU" or operation.has_kernel_for_dispatch_key("CUDA"):
                answer = Hidden(_answer(operation, bytes_of, runs=key == "CUDA"))
                ours.impl(name, answer, key, with_keyset=key == "CUDA")


def _answer(operation: Any, bytes_of: Bytes, *, runs: bool) -> Callable[..., Any]:
    """Return a collective in which all ranks hold what this one holds; NCCL's runs, too."""
    from torch._C._distributed_c10d import FakeWork

    name = operation._schema.name.removeprefix("c10d::")
    returned = len(operation._schema.returns)
    boxed = torch.library.get_kernel(operation, "CUDA").call_boxed if runs else None

    def collective(*args: Any, **kwargs: Any) -> Any:
        if boxed is not None:
            result, args = boxed(*args, **kwargs), args[1:]
        else:
            work = FakeWork().boxed()
            result = (args[0], work) if returned == 2 else work if returned else None
        targets = leaves(args[0])
        if name.startswith("alltoall") and runs:
            _connect(args[2], bytes_of)
        if name in ("send", "recv_", "broadcast_"):
            for tensor in targets:
                _post(name, tensor, args, bytes_of)
        elif "barrier" not in name and name != "recv_any_source_":
            for to, source, change in _sent(name, args, targets):
                if change is None or (runs and max(to.numel(), source.numel()) > FEW):
                    bytes_of.note(to, LOST)
                elif to.numel() and source.numel():
                    values = change(bytes_of.read(source)).flatten()
                    values = values.repeat(-(-to.numel() // max(values.numel(), 1)))
                    values, known = values[: to.numel()].view_as(to), bytes_of.is_known(source)
                    bytes_of.write(to, values, known=known)
        return result

    return collective


def _sent(name: str, args: Any, targets: list[torch.Tensor]) -> Iterator[tuple[Any, Any, Any]]:
    """Return each tensor that a collective writes, what this rank gives, and what becomes of it.

    All ranks give the same. So a sum is so many times as much, and what others send to this rank is
    what it sends to itself.
    """
    at = 2 if isinstance(args[1], torch.Tensor | list) else 1
    members = distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(args[at]))
    ranks, me = len(members), members.index(distributed.get_rank())
    if name == "reduce_" and args[3] != me:
        return
    sources = targets if at == 1 else [args[1]] if name.endswith("base_") else args[1]
    if name in ("reduce_scatter_", "scatter_"):
        sources = [one[me] for one in sources]
    # Before torch 2.13, nobody can ask which reduction it is.
    kind = getattr(args[at + 1], "op", lambda: None)() if "reduce" in name else _SAME[0]

    def change(values: torch.Tensor) -> torch.Tensor:
        if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
            values = values.flatten().chunk(ranks)[me]
        if name == "alltoall_base_":
            values = (values.split(args[4]) if args[4] else values.chunk(ranks))[me]
        return _COMBINED[kind](values, ranks) if kind in _COMBINED else values

    if name == "alltoall_":
        sources = [sources[me]]
    for to, source in zip(targets, cycle(sources)) if sources else ():
        yield to, source, change if kind in (*_SAME, *_COMBINED) else None


def _connect(group: Any, bytes_of: Bytes) -> None:
    """Count the buffers of an all-to-all's connections within a node, once for each group."""
    members = distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(group))
    local, me = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), distributed.get_rank()
    near = sum(one // local == me // local for one in members) - 1
    if tuple(members) not in _CONNECTED:
        _CONNECTED.add(tuple(members))
        if not bytes_of.connect(torch.cuda.current_device(), near * PAIR):
            raise RuntimeError("no room for NCCL's buffers")


def _post(name: str, tensor: torch.Tensor, args: Any, bytes_of: Bytes) -> None:
    """Keep what this rank sends, or write what another one has sent in its own run."""
    members = distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(args[1]))
    peer, me = members[args[2]], distributed.get_rank()
    if name != "broadcast_":
        PEERS[peer] = None
    if tensor.dtype.is_floating_point or tensor.numel() > FEW or not _MESSAGES:
        return
    box = f"{members}" if name == "broadcast_" else f"{peer if name == 'send' else me}"
    sender = me if name == "send" else peer
    file = _MESSAGES[0] / f"{sender}-{zlib.crc32(box.encode())}"
    if sender == me:
        values = bytes_of.read(tensor).flatten().tolist()
        _SENT.setdefault(file.name, []).append(values)
        if len(_SENT[file.name]) <= _MOST_KEPT:
            files.write(file, json.dumps(_SENT[file.name]))
        return
    at = _READ[file.name] = _READ.get(file.name, -1) + 1
    message = torch.tensor(_received(file, at, sender), dtype=tensor.dtype)
    bytes_of.write(tensor, message.view_as(tensor), known=True)


def _received(file: Path, at: int, sender: int) -> list[int]:
    """Return a message, once the run of the rank that sends it has written it."""
    while True:
        is_over = (file.parent / f"ended-{sender}").exists()
        there = json.loads(files.read(file)) if file.exists() else []
        if there[at:] or (there and is_over):
            return list([*there[at:], there[-1]][0])
        if is_over:
            raise RuntimeError(f"no message of rank {sender}: its run ended without sending it")
        (file.parent / f"wanted-{sender}").touch()
        time.sleep(0.05)
