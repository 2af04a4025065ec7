"""The processes of a run: who they are, and all that they exchange."""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from math import isnan, nan
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.batching import checked_size
from stretto.errors import DataError, TrainingError, first_line
from stretto.runtime.rank_monitor import RankMonitor, meet, own_store
from stretto.runtime.rendezvous import join_group
from stretto.runtime.sharded import is_dtensor
from stretto.timing.grammar import whole

_T = TypeVar("_T")
_GO_ON = "go on with the other ranks"
_SUMS = ("marks", "squares")


def is_started() -> bool:
    """Return whether this process has others to talk to.

    >>> is_started()
    False
    """
    return dist.is_available() and dist.is_initialized()


@final
@dataclass
class _GlooGroup:
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

    _shared: ClassVar[_GlooGroup | None] = None

    @classmethod
    def join(cls, timeout: timedelta | None) -> _GlooGroup:
        """Return the group; every rank must call it.

        Raises:
            TrainingError: some ranks did not come in time.
        """
        found, world = cls._shared, dist.group.WORLD
        if found is not None and found.world is not world:
            found = None
        calls = list[bytes]()
        if found is not None:
            name = f"{found.group.group_name}/{found.num_runs}"
            limit = timeout or dist.distributed_c10d.default_pg_timeout
            calls = meet(own_store(name), str(found.calls), limit)
        # Making a group is a meeting itself, also of ranks that phantomgpu stands in for.
        if found is None or len(set(calls)) > 1 or isnan(found.calls):
            group = dist.new_group(backend="gloo", timeout=timeout)
            cls._shared = found = cls(world, group)
        found.num_runs += 1
        return found

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call."""
        self.calls += 1
        try:
            yield
        except BaseException:
            self.calls = nan
            raise


class _Failure(NamedTuple):
    """What one rank sends in place of an answer."""

    error: Exception


@final
class Ranks:
    """This process among those of a run.

    `rank` and `world_size` count processes. Those that share one model have the same samples and
    are one data-parallel rank: `dp_rank` of `dp_world_size`.

    Until `join`, the processes talk over the default group of torch.distributed, as the user has
    made it.

    >>> ranks = Ranks()
    >>> ranks.agree([1.0]), ranks.gather("a"), ranks.from_first(lambda: 2)
    ([1.0], ['a'], 2)

    Args:
        device: where this rank computes; None: its CUDA device if there is one, else the CPU.
        timeout: after `join`, how long a rank waits for the others in any collective, those of the
            default group included; None: as torch sets it.
    """

    def __init__(
        self, device: torch.device | None = None, timeout: timedelta | None = None
    ) -> None:
        self._device, self._timeout = device, timeout
        self._gloo: _GlooGroup | None = None
        self.rank, self.world_size = 0, 1
        if is_started():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.share_samples(self.rank, self.world_size)
        self.monitor = RankMonitor(self.rank, self.world_size, timeout=timeout)
        """Says why this rank waits for the others in vain."""

    @classmethod
    def of(cls, rank: int | None = None, world_size: int | None = None) -> Self:
        """Return the processes that share each batch; None: all those of torch.distributed.

        >>> ranks = Ranks.of(rank=1, world_size=4)
        >>> ranks.dp_rank, ranks.dp_world_size
        (1, 4)

        Raises:
            DataError: only one of the two is given, or the rank is not below the world size.
            BatchSizeError: the world size is not an integer of at least 1.
        """
        if (rank is None) != (world_size is None):
            why = f"world_size is {world_size}"
            raise DataError.bad("rank", rank, why, "pass both, or neither")
        found = cls()
        if world_size is not None:
            world_size, number = checked_size(world_size, "a world size"), whole(rank)
            if number is None or not 0 <= number < world_size:
                why = f"ranks are integers from 0 to {world_size - 1}"
                raise DataError.bad("rank", rank, why, "pass the rank of this process")
            if world_size == 1 or not is_started():  # no other process is connected
                found.rank, found.world_size = number, 1
            found.share_samples(number, world_size)
            # Other processes may do something else.
            found._are_known = found.world_size in (1, world_size)
        return found

    @classmethod
    def from_environment(cls, device: str | None = None, timeout: timedelta | None = None) -> Self:
        """Join the process group that `torchrun` describes, if there is one.

        Raises:
            TrainingError: the device does not exist.
        """
        found = find_device(device)
        if found.type == "cuda":
            torch.cuda.set_device(found)
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if launched and not dist.is_initialized():
            join_group("nccl" if found.type == "cuda" else "gloo", timeout)
            # To the end of the process: evaluations and other runs may follow the first one.
            atexit.register(_leave_group)
        return cls(found, timeout).join()

    def join(self) -> Self:
        """Talk over a gloo group from now on: no accelerator has to wait for what ranks exchange.

        Every rank must call it.
        """
        if self.world_size > 1 and self._gloo is None:
            self.limit_waiting(dist.group.WORLD)
            with self.monitor.watch():
                self._gloo = _GlooGroup.join(self._timeout)
            group = self._gloo.group
            _set_timeout(group, self._timeout or dist.distributed_c10d.default_pg_timeout)
            self.monitor.store = own_store(f"{group.group_name}/run/{self._gloo.num_runs}")
        return self

    def share_samples(self, dp_rank: int, dp_world_size: int, *, is_loss_rank: bool = True) -> None:
        """Say which ranks have the same samples; by default each rank has its own.

        Args:
            dp_rank: the number of this rank among those with samples of their own.
            dp_world_size: how many there are.
            is_loss_rank: whether losses, tokens and samples of this rank are added up: of ranks
                with the same samples, one is.
        """
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.is_loss_rank = is_loss_rank
        self._are_known = True

    @property
    def can_compare(self) -> bool:
        """Whether several processes are connected, and all of them take part in the run."""
        is_real = not is_started() or dist.get_backend() not in ("fake", "threaded")
        return self.world_size > 1 and self._are_known and is_real

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self._device is None:
            self._device = find_device(None)
        return self._device

    @property
    def are_all_dp(self) -> bool:
        """Whether there are several processes, and each has samples of its own."""
        return self.world_size == self.dp_world_size > 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is global."""
        return self.rank == 0

    def counted(self, values: Sequence[float]) -> list[float]:
        """Return `values` of a loss rank; else zeros, also for those that are nan."""
        return [value if self.is_loss_rank else 0.0 for value in values]

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the sums of `values` over all ranks; exact for integers up to 2^53."""
        if self.world_size == 1:
            return list(values)
        with self._calling() as group:
            # NCCL knows only tensors of CUDA devices.
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
            packed = torch.tensor(values, dtype=torch.float64, device=device)
            dist.all_reduce(packed, group=group)
        sums: list[float] = packed.tolist()
        return sums

    def reduce(self, tensor: Tensor, operation: str) -> None:
        """Replace a tensor by its "sum", "max" or "min" over all ranks, element by element."""
        if self.world_size > 1:
            with self._calling() as group:
                over = group if tensor.device.type == "cpu" else None
                dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper()), group=over)

    def gather(self, value: _T, *, call: str = "", only_first: bool = False) -> list[_T]:
        """Return the values of all ranks, in their order, on every rank.

        They are pickled, so each is a copy.

        Args:
            value: that of this rank.
            call: what the user has called, if every call of it begins with this.
            only_first: whether the other ranks get nothing, and do not compare `call`.

        Raises:
            TrainingError: another rank has made another call, or has ended.
        """
        if self.world_size == 1:
            return [value]
        gets = self.is_first or not only_first
        found: list[Any] = [None] * self.world_size if gets else []
        with self._calling() as group:
            if only_first:
                dist.gather_object((call, value), found or None, group=group)
            else:
                dist.all_gather_object(found, (call, value), group=group)
        calls = [each for each, _ in found]
        if len(set(calls)) > 1:
            first = {each or "another method": calls.index(each) for each in dict.fromkeys(calls)}
            why = " and ".join(f"rank {rank} has called {each}" for each, rank in first.items())
            instead = "call Trainer(), resume() and fit() on every rank, in the same order"
            raise TrainingError.cannot(_GO_ON, why=why, instead=instead)
        return [value for _, value in found]

    def differing(self, text: str, *, call: str = "") -> list[str]:
        """Return the texts of all ranks if they differ, else nothing. Every rank must call it.

        Before `join` the ranks meet in the store, so no group is made and no device waits.

        Raises:
            TrainingError: another rank has made another call, has ended, or does not come.
        """
        digest = sha256(text.encode()).hexdigest()
        if self._gloo is not None or not is_started():
            is_same = len(set(self.gather(digest, call=call))) == 1
            return [] if is_same else self.gather(text)
        limit = self._timeout or dist.distributed_c10d.default_pg_timeout
        with self.monitor.watch():
            number = own_store("meetings").add(str(self.rank), 1)
            store = own_store(f"meeting/{number}")
            for name, one in zip(_SUMS, marks(int(digest[:8], 16)), strict=True):
                store.add(name, one)
            if store.add("here", 1) == self.world_size:
                store.set("all", "")
            try:
                store.wait(["all"], limit)
            except RuntimeError as error:
                why = f"one of them did not come to the same step ({first_line(error)})"
                instead = "draw the same steps on every rank, and look for an error of another one"
                raise TrainingError.cannot(_GO_ON, why=why, instead=instead) from error
            if store.add("here", 0) < self.world_size:  # one process plays all ranks
                return []
            if all_same([store.add(name, 0) for name in _SUMS], self.world_size):
                return []
            return [one.decode() for one in meet(store, text, limit)]

    def gather_dp(self, value: _T) -> list[_T]:
        """Return the value of each data-parallel rank, in their order. Every process must call it.

        Raises:
            DataError: the ranks are not connected, or several processes of one data-parallel rank
                have different values. All of them raise it.
        """
        if self.dp_world_size == 1:
            return [value]
        self.check_connected()
        rows = self.gather((self.dp_rank, value))
        found: list[Any] = sorted(set(rows))
        if [rank for rank, _ in found] != list(range(self.dp_world_size)):
            why = f"the {len(rows)} processes are other ranks, or those of a rank differ"
            instead = "pass the rank and world_size of the processes that share a batch"
            raise DataError.bad("world_size", self.dp_world_size, why, instead)
        return [each for _, each in found]

    def check_connected(self) -> None:
        """Refuse to exchange anything if torch.distributed is not started.

        Raises:
            DataError: it is not, and several ranks share each batch.
        """
        if self.dp_world_size > 1 and self.world_size == 1:
            why = "torch.distributed is not started"
            instead = "call init_process_group(), or finish(tokens=..., seconds=...) with the "
            instead += "sums of all ranks"
            raise DataError.bad("world_size", self.dp_world_size, why, instead)

    def together(self, work: Callable[[], _T], *, call: str = "") -> list[_T]:
        """Return what `work` returns on each rank; every rank must call it.

        Args:
            work: what each rank does; without a collective in it.
            call: as in `gather`.

        Raises:
            Exception: what it raises on one rank, on every rank.
        """
        if self.world_size == 1:
            return [work()]
        answer: Any
        own: Exception | None = None
        try:
            answer = work()
        except Exception as error:  # noqa: BLE001  raised below, when all ranks know of it
            answer, own = _Failure(self._portable(error)), error
        answers = self.gather(answer, call=call)
        for rank, each in enumerate(answers):
            if isinstance(each, _Failure):
                raise each.error if own is None or rank != self.rank else own
        return answers

    def from_first(self, work: Callable[[], _T], *, call: str = "") -> _T:
        """Return what `work` returns on the first rank, which alone does it.

        Raises:
            Exception: what it raises there, on every rank.
        """
        found: list[Any] = self.together(lambda: work() if self.is_first else None, call=call)
        answer: _T = found[0]
        return answer

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give `tensors` the values that they have on the first rank, but for those spread."""
        if self.world_size > 1:
            for tensor in tensors:
                if not is_dtensor(tensor):
                    with self.monitor.watch():
                        dist.broadcast(tensor, 0)

    def limit_waiting(self, group: Any) -> None:
        """Let ranks wait in a group only as long as in others."""
        if self._timeout is not None:
            _set_timeout(group, self._timeout)

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """Translate errors of a collective; yield the group that it goes over."""
        with self.monitor.watch():
            if self._gloo is None:
                yield None
                return
            with self._gloo.calling():
                yield self._gloo.group

    def _portable(self, error: Exception) -> Exception:
        """Return an error that other ranks can read; the text of one that cannot be pickled."""
        try:
            copied = pickle.loads(pickle.dumps(error))  # noqa: S301  made here
        except Exception:  # noqa: BLE001  whatever the class of a user's error raises
            copied = None
        if isinstance(copied, Exception):
            return copied
        why, instead = f"rank {self.rank} has failed: {first_line(error)}", "look for its own error"
        return TrainingError.cannot(_GO_ON, why=why, instead=instead)


def marks(number: int) -> tuple[int, int]:
    """Return two numbers whose sums over ranks show whether `number` is the same on all of them."""
    mark = number % 2**20  # so that sums of squares are exact
    return mark, mark * mark


def all_same(sums: Sequence[float], world_size: int) -> bool:
    """Return whether all ranks had the same marks, from their sums; equal on every rank.

    >>> all_same([3 + 3, 9 + 9], 2), all_same([1 + 2 + 3, 1 + 4 + 9], 3)
    (True, False)
    """
    total, squares = map(int, sums)
    return squares * world_size == total**2  # by Cauchy-Schwarz, of whole numbers


def _set_timeout(group: Any, timeout: timedelta) -> None:
    # `ProcessGroup.set_timeout` is not yet in torch 2.7.
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _leave_group() -> None:
    if dist.is_initialized():
        # A thread of gloo may still wait for the GIL, to drop the context of the last backward
        # pass. DDP's reducer, freed later, would wait for that thread with the GIL held.
        time.sleep(0.01)
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
