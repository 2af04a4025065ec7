"""The processes of a run: how they meet, and what they exchange.

All attempts of a job of torchrun share one key-value store, which keeps the entries of dead
processes, such as their addresses, so a new process may try to reach a dead one (torch 2.13, gloo;
pytorch#135712). Counts of restarts differ between nodes. So the processes of an attempt agree on a
new name and use only keys under it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import isfinite, isnan, nan
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.checkpoint.sharding import is_dtensor
from stretto.distributed.peers import Peers, own_store
from stretto.errors import StrettoError, TrainingError, first_line
from stretto.runtime.gradients import all_sum, is_started

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

    Each process writes who it is. Rank 0 proposes a name to the processes that it sees, and those
    that are among them agree. A dead process never agrees; its entry is replaced by a live one.

    Raises:
        TrainingError: some process did not come in time.
    """
    own, others = uuid.uuid4().hex, range(1, world_size)
    store.set(f"{_KEY}/here/{rank}", own)
    deadline = clock() + _PATIENCE_SECONDS
    proposed: list[str] = []
    name = ""
    while True:
        if rank == 0 and store.check([f"{_KEY}/here/{other}" for other in others]):
            seen = [own, *(store.get(f"{_KEY}/here/{other}").decode() for other in others)]
            if seen != proposed:
                proposed, name = seen, f"{_KEY}/{uuid.uuid4().hex}"
                store.set(f"{_KEY}/proposal", json.dumps([name, *seen]))
            if store.check([f"{name}/yes/{other}" for other in others]):
                store.set(f"{name}/agreed", "")
                return name
        elif rank and store.check([f"{_KEY}/proposal"]):
            name, *proposed = map(str, json.loads(store.get(f"{_KEY}/proposal")))
            if own in proposed:
                store.set(f"{name}/yes/{rank}", "")
                if store.check([f"{name}/agreed"]):
                    return name
        if clock() > deadline:
            raise TrainingError.cannot(
                f"begin on {world_size} ranks",
                why=f"not all of them came within {_PATIENCE_SECONDS} s",
                instead="look for the error of the one that did not",
            )
        sleep(_WAIT_SECONDS)


@final
@dataclass
class _Group:
    """A gloo group, which the runs of this process use one after the other.

    Each has three threads. A run gets a new one only if the ranks have not made equally many calls
    in the last: one of them may still wait in it.
    """

    world: Any
    """The default group that it is of."""
    group: Any
    calls: float = 0
    """Collectives so far; nan after one that failed."""
    num_runs: int = 0

    _shared: ClassVar[_Group | None] = None

    @classmethod
    def join(cls, timeout: timedelta | None) -> _Group:
        """Return the group; every rank must call it."""
        found = cls._shared
        if found is None or found.world is not dist.group.WORLD or not found._is_idle():
            group = dist.new_group(backend="gloo", timeout=timeout)
            cls._shared = found = cls(dist.group.WORLD, group)
        found.num_runs += 1
        return found

    def _is_idle(self) -> bool:
        """Return whether all ranks have made equally many calls."""
        store = own_store(f"{self.group.group_name}/{self.num_runs}")
        keys = [f"calls/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], str(self.calls))
        calls = [store.get(key) for key in keys]  # waits for those that come later
        return len(set(calls)) == 1 and not isnan(self.calls)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call."""
        self.calls += 1
        try:
            yield
        except BaseException:
            self.calls = nan
            raise


@final
class Ranks:
    """This process among those of the run.

    What the ranks must agree on in a step travels in one small sum (`agree`), over gloo, so that
    no accelerator has to wait for it.

    Args:
        device: where this rank computes.
        timeout: how long a rank waits for the others in any collective, those of the default group
            included; None: as torch sets it.
    """

    def __init__(self, device: torch.device, timeout: timedelta | None = None) -> None:
        self.device = device
        self.counts = True
        """Whether what this rank has seen is added up: of ranks with the same samples, one is."""
        self._timeout = timeout
        self._group: Any = None
        if is_started():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.world_size = 0, 1
        self.peers = Peers(self.rank, self.world_size, timeout=timeout)
        """Explains why this rank waits for the others in vain."""
        if self.world_size > 1:
            self.limit_waiting(dist.group.WORLD)
            self._shared = _Group.join(timeout)
            self._group = self._shared.group
            wait = dist.distributed_c10d.default_pg_timeout if timeout is None else timeout
            dist.distributed_c10d._set_pg_timeout(wait, self._group)  # torch has no public way
            self.peers.store = own_store(f"{self._group.group_name}/run/{self._shared.num_runs}")

    @classmethod
    def from_environment(cls, device: str | None = None, timeout: timedelta | None = None) -> Ranks:
        """Join the process group that `torchrun` describes, if there is one.

        Raises:
            TrainingError: the device does not exist.
        """
        found = find_device(device)
        if found.type == "cuda":
            torch.cuda.set_device(found)
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if launched and not dist.is_initialized():
            join_group("nccl" if found.type == "cuda" else "gloo")
            # To the end of the process: evaluations and other runs may follow the first one.
            atexit.register(_leave_group)
        return cls(found, timeout)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is global."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of `values` over the ranks that count."""
        return self.agree(self.counted(values))

    def counted(self, values: Sequence[float]) -> list[float]:
        """Return `values` if this rank counts, else zeros: also for those that are nan."""
        return [value if self.counts else 0.0 for value in values]

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the sums of `values` over all ranks; exact for integers up to 2^53."""
        if self.world_size == 1:
            return list(values)
        with self._meeting():
            return all_sum(values, self._group)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Translate errors of a collective, which is counted."""
        with self.peers.meeting(), self._shared.calling():
            yield

    def reduce(self, tensor: Tensor, operation: str) -> None:
        """Replace a tensor by its "sum", "max" or "min" over all ranks, element by element."""
        if self.world_size > 1:
            # On the host over gloo, so that no accelerator has to wait for it.
            group = self._group if tensor.device.type == "cpu" else None
            with self._meeting():
                dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper()), group=group)

    def least(self, value: int) -> int:
        """Return the least value that a rank has."""
        return min(map(int, self.gather(value)))

    def gather(self, value: Any, *, call: str = "") -> list[Any]:
        """Return the values of all ranks, in their order, on every rank.

        They are pickled, so each is a copy.

        Args:
            value: that of this rank.
            call: what the user has called, if every call of it begins with this.

        Raises:
            TrainingError: another rank has made another call, or has ended.
        """
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self._meeting():
            dist.all_gather_object(found, (call, value), group=self._group)
        calls, values = zip(*found, strict=True)
        if len(set(calls)) > 1:
            raise TrainingError.cannot(
                "go on with the other ranks",
                why=" and ".join(
                    f"rank {calls.index(one)} has called {one or 'another method'}"
                    for one in dict.fromkeys(calls)
                ),
                instead="call Trainer(), resume() and fit() on every rank, in the same order",
            )
        return list(values)

    def collect(self, value: object) -> list[Any]:
        """Return the values of all ranks on the first, which are pickled; nothing on the others."""
        found: list[Any] = [None] * self.world_size if self.is_first else []
        with self._meeting():
            dist.gather_object(value, found if self.is_first else None, group=self._group)
        return found

    def from_first(self, work: Callable[[], str], *, call: str = "") -> str:
        """Return what `work` returns on the first rank, which alone does it.

        Raises:
            StrettoError: that of the first rank, on every rank; or another rank has made another
                call than `call`.
        """
        if self.world_size == 1:
            return work()
        answer: str | StrettoError = ""
        if self.is_first:
            try:
                answer = work()
            except StrettoError as error:
                answer = error.with_traceback(None)
        answer = self.gather(answer, call=call)[0]
        if isinstance(answer, StrettoError):
            raise answer
        return answer

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give `tensors` the values that they have on the first rank, but for those spread."""
        if self.world_size > 1:
            for tensor in tensors:
                if not is_dtensor(tensor):
                    with self.peers.meeting():
                        dist.broadcast(tensor, 0)

    def limit_waiting(self, group: Any) -> None:
        """Let ranks wait in a group only as long as in others."""
        if self._timeout is not None:
            dist.distributed_c10d._set_pg_timeout(self._timeout, group)  # torch has no public way


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def find_device(name: str | None) -> torch.device:
    """Return the device of that name; by default this rank's CUDA device if there is one.

    Raises:
        TrainingError: it does not exist.
    """
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if name is None:
        return own if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        device = own if name == "cuda" else device
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TrainingError.bad("device", name, first_line(error), "leave device out") from None
    return device


Plain: TypeAlias = bool | int | float | str | None
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST = 100


def check_agreement(settings: Mapping[str, str], ranks: Ranks, *, call: str) -> None:
    """Refuse to go on if `settings` are not the same on every rank, which must all call it.

    Ranks with different settings would train on wrong samples, or wait for each other without end.
    They compare a digest; only if it differs do they exchange the settings.

    Args:
        settings: by name.
        ranks: the processes of the run.
        call: what the user has called.

    Raises:
        TrainingError: they are not; it names the first that differs, on every rank.
    """
    if ranks.world_size == 1:
        return
    text = json.dumps(settings)
    if len(set(ranks.gather(hashlib.sha256(text.encode()).hexdigest(), call=call))) == 1:
        return
    difference = first_difference([json.loads(one) for one in ranks.gather(text)])
    raise TrainingError.cannot(
        f"train on {ranks.world_size} ranks with different settings",
        why=difference,
        instead="write the same settings on every rank",
    )


def first_difference(records: Sequence[Mapping[str, str]]) -> str:
    """Return the first setting that differs, its values, and who has them.

    >>> first_difference([{"seed": "1"}, {"seed": "2"}, {"seed": "1"}])
    'seed is 1 on ranks 0, 2 and 2 on rank 1'
    """
    for name in {name: None for record in records for name in record}:
        values = [record.get(name, "missing") for record in records]
        if len(set(values)) > 1:
            return f"{name} is {_listed(values)}"
    return "their order differs"


def in_batch(number: int, values: Mapping[str, object]) -> dict[str, str]:
    """Return what functions, which are compared by name only, or streams may have set apart.

    >>> in_batch(3, {"lr": 0.1})
    {'lr in batch 3': '0.1'}
    """
    return {
        f"{name} in batch {number}": f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }


def plain(value: Any) -> Plain:
    """Return a setting as JSON keeps it: None, a number, a flag or text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and isfinite(value) else as_text(value)


def as_text(value: Any) -> str:
    """Return a setting as it is compared and shown: a function by its name, else its repr."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() == 1 else list(value.shape)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={as_text(one)}" for name, one in value.items())
    return _ADDRESS.sub("", repr(value))


def _listed(values: Sequence[str]) -> str:
    """Return the different values, each with its ranks; of a long one, the part that differs."""
    letters = enumerate(zip(*values, strict=False))
    first = next((place for place, several in letters if len(set(several)) > 1), 0)
    start = max(0, first - _LONGEST // 4)
    by_value: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(str(rank))
    parts = []
    for value, ranks in by_value.items():
        part = value[start : start + _LONGEST]
        shown = value if len(value) <= _LONGEST else f"...{part}..."
        listed = ", ".join(ranks[:8]) + (" ..." if len(ranks) > 8 else "")
        parts.append(f"{shown} on rank{'s' if len(ranks) > 1 else ''} {listed}")
    return " and ".join(parts[:3]) + (" (and more)" if len(parts) > 3 else "")
