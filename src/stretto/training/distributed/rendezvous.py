"""How the processes that `torchrun` has started find each other, also when it starts them again.

All attempts of a job share one key-value store, and what a dead process wrote in it stays: its
address, for one, so that a new process tries to reach it (torch 2.13, gloo; pytorch#135712). The
count of restarts does not tell attempts apart, for each node has its own. So the processes agree on
a name that nobody has used, and keep to the keys under it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from stretto.errors import TrainingError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "stretto"
_WAIT_SECONDS = 0.01
_PATIENCE_SECONDS = 300


def join_group(backend: str) -> None:
    """Make the default process group of all that `torchrun` has started.

    Raises:
        TrainingError: some of them did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=False)  # type: ignore[attr-defined]
    name = agree_on_name(store, rank, world_size)
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)


def agree_on_name(
    store: Store,
    rank: int,
    world_size: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Return a new name, the same in all processes of this attempt.

    Each says who it is. The first one proposes a name to those it sees; who finds itself among them
    agrees; what the dead have left never does, and is replaced by what the living say.

    Raises:
        TrainingError: some process did not come in time.
    """
    own = uuid.uuid4().hex
    store.set(f"{_KEY}/here/{rank}", own)
    deadline = clock() + _PATIENCE_SECONDS
    look = _Proposer(store, own, world_size) if rank == 0 else _Follower(store, own, rank)
    while (name := look()) is None:
        if clock() > deadline:
            raise TrainingError.cannot(
                f"begin on {world_size} ranks",
                why=f"not all of them came within {_PATIENCE_SECONDS} s",
                instead="look for the error of the one that did not",
            )
        sleep(_WAIT_SECONDS)
    return name


class _Proposer:
    """The first process: proposes until all whom it sees have agreed."""

    def __init__(self, store: Store, own: str, world_size: int) -> None:
        self._store = store
        self._own = own
        self._others = range(1, world_size)
        self._seen: list[str] | None = None
        self._name = ""

    def __call__(self) -> str | None:
        keys = [f"{_KEY}/here/{rank}" for rank in self._others]
        if not self._store.check(keys):
            return None
        seen = [self._own, *(self._store.get(key).decode() for key in keys)]
        if seen != self._seen:
            self._seen, self._name = seen, f"{_KEY}/{uuid.uuid4().hex}"
            self._store.set(f"{_KEY}/proposal", json.dumps([self._name, *seen]))
        if not self._store.check([f"{self._name}/yes/{rank}" for rank in self._others]):
            return None
        self._store.set(f"{self._name}/agreed", "")
        return self._name


class _Follower:
    """Any other process: agrees to what it is part of."""

    def __init__(self, store: Store, own: str, rank: int) -> None:
        self._store = store
        self._own = own
        self._rank = rank

    def __call__(self) -> str | None:
        if not self._store.check([f"{_KEY}/proposal"]):
            return None
        name, *seen = json.loads(self._store.get(f"{_KEY}/proposal"))
        if self._own not in seen:
            return None
        self._store.set(f"{name}/yes/{self._rank}", "")
        return str(name) if self._store.check([f"{name}/agreed"]) else None
