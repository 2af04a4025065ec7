"""Names the ranks that ended, or did not come, when a collective fails.

The errors of gloo and NCCL do not name the rank that they wait for. So each rank that gives up
writes its number to the store of the process group; a number that is missing there is of a rank
that is stuck.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from stretto.errors import StrettoError, TrainingError

_LOST = (
    *("gloo/transport", "connection closed by peer", "connection reset by peer"),
    *("ncclremoteerror", "communicator was aborted"),
)
"""What gloo and NCCL say if another process has ended, or does not come."""
_LATE = "timed out waiting"
"""What gloo says if another process does not come in time."""
_MOST = timedelta(seconds=30)
"""How long to wait for other ranks that give up, which began to wait at different times; at most an
eighth of the time that a rank waits for others."""
_MOMENT = timedelta(seconds=0.5)
"""How long to wait for the first rank that gives up to write."""
_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 5.0
"""How much longer the store may take to answer."""


@final
class RankMonitor:
    """The other ranks, for a rank that waits for them.

    Args:
        rank: this rank.
        world_size: how many there are.
        store: where they have met, under a name that no other run uses; None: it is not known.
        timeout: how long a rank waits; None: as torch sets it.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Store | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self.store, self._timeout = store, timeout

    @contextmanager
    def watch(self, *, inside_a_pass: bool = False) -> Iterator[None]:
        """Translate the error of a collective that another rank has left or never reached.

        Args:
            inside_a_pass: whether other errors may come as well; those stay what they are.

        Raises:
            TrainingError: another rank has ended, or did not come in time.
        """
        try:
            yield
        except StrettoError:
            raise
        except RuntimeError as error:
            said = str(error).lower()
            if inside_a_pass and not any(sign in said for sign in _LOST):
                raise
            raise self._explained(error, is_late=_LATE in said) from error

    def _explained(self, error: RuntimeError, *, is_late: bool) -> TrainingError:
        grace = _MOST if self._timeout is None else min(self._timeout / 8, _MOST)
        answers: list[list[int] | None] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the process that keeps the store has ended
                answers.append(self._missing(grace, is_late))

        # In a thread: if the process that keeps the store is stuck itself, no call returns.
        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(grace.total_seconds() + min(_ANSWER_SECONDS, grace.total_seconds()))
        missing = answers[0] if answers else None
        if missing:
            why, instead = _late(missing, self._timeout)
        elif not is_late and missing is None:
            why, instead = "one of them has ended", "look for its own error, which came first"
        elif missing is None:
            why, instead = "one did not come in time", "look at rank 0, which keeps the store"
        else:
            why = "all of them wait, each for something else, or one came too late"
            instead = "make the same calls on every rank, or raise rank_timeout"
        said = textwrap.shorten(str(error), 200, placeholder=" ...")
        what = "go on with the other ranks"
        return TrainingError.cannot(what, why=f"{why} ({said})", instead=instead)

    def _missing(self, grace: timedelta, is_late: bool) -> list[int] | None:  # noqa: FBT001
        """Return the ranks that did not come; None: it is not known, or none is late."""
        if self.store is None:
            return None
        if is_late:
            self.store.set("late", "")
        elif not _come(self.store, ["late"], _MOMENT):
            return None
        here = [f"here/{rank}" for rank in range(self._world_size)]
        self.store.set(here[self._rank], "")
        _come(self.store, here, grace)
        missing = [rank for rank, key in enumerate(here) if not self.store.check([key])]
        # All ranks report the same, a rank that arrives later included.
        found: list[int] = json.loads(self.store.compare_set("missing", "", json.dumps(missing)))
        return found


def _late(missing: Sequence[int], limit: timedelta | None) -> tuple[str, str]:
    """Return why some ranks are waited for in vain, and what to do."""
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:8]))}"
    limit_text = "in time" if limit is None else f"within {limit.total_seconds():g} s"
    instead = "look at it, for example with py-spy; if it needs longer, raise rank_timeout"
    return f"{who} did not come {limit_text}", instead


def _come(store: Store, keys: Sequence[str], limit: timedelta) -> bool:
    """Wait for keys; `Store.wait` would write warnings when the time is over."""
    deadline = time.monotonic() + limit.total_seconds()
    while not (has_come := store.check(list(keys))) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return has_come


def meet(store: Store, own: str, limit: timedelta) -> list[bytes]:
    """Return what each rank says, once all have said something; every rank must call it.

    Args:
        store: where they meet, under a name that is used once.
        own: what this rank says.
        limit: how long it waits for the others.

    Raises:
        TrainingError: some did not come.
    """
    keys = [f"meet/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], own)
    if not _come(store, keys, limit):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        why, instead = _late(missing, limit)
        raise TrainingError.cannot("go on with the other ranks", why=why, instead=instead)
    return [store.get(key) for key in keys]


def own_store(name: str) -> Store:
    """Return the store in which the ranks have met, cut to the keys under `name`."""
    store = dist.distributed_c10d._get_default_store()  # torch has no public way
    return PrefixStore(f"stretto/{name}", store)
