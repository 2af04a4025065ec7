"""Worker processes that fetch samples."""

from __future__ import annotations

import copy
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stretto.data.fetch import Fetch, no_such_sample
from stretto.data.indices import sample_seed, seed_generators
from stretto.data.spec import DataSpec
from stretto.errors import DataError
from stretto.settings import Loading

Element: TypeAlias = tuple[int, list[int]]
"""What a worker fetches at once: the start in the rank's stream, and indices."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def with_own_settings(loading: Loading, data: Any) -> Loading:
    """Return the settings with None replaced by those of `data`, if it is a `DataLoader`.

    >>> with_own_settings(Loading(num_workers=2), DataLoader([1, 2, 3])).num_workers
    2
    """
    if not isinstance(data, DataLoader):
        return loading
    names = ("num_workers", "prefetch_factor", "pin_memory", "collate_fn")
    own = {name: getattr(data, name) for name in names if getattr(loading, name) is None}
    if not own.get("num_workers", loading.num_workers):
        own["prefetch_factor"] = None  # nothing is fetched ahead
    return replace(loading, **own)


def pins_memory(loading: Loading) -> bool:
    """Return whether batches go to pinned memory."""
    return bool(loading.pin_memory) and torch.accelerator.is_available()


def fetched_ahead(
    fetch: Fetch, elements: Iterator[Element], spec: DataSpec, loading: Loading, rank: int
) -> Iterator[Any]:
    """Yield the batches of `elements`, which workers fetch ahead.

    One iterator serves the whole run: workers start once, not for each epoch (1.26 times the
    throughput for short epochs). Torch's global generator is not used. A worker seeds its
    generators for each element by the seed, the rank and the element's place. So random
    augmentation is the same after a resume and for any number of workers. What only torch's loader
    has (`worker_init_fn`, `timeout`, `multiprocessing_context`) is that of a given `DataLoader`.
    """
    own = spec.data if isinstance(spec.data, DataLoader) else None
    generator = torch.Generator()
    generator.manual_seed(sample_seed(loading.seed, -1, rank))
    loader: DataLoader[Any] = DataLoader(
        _Seeded(fetch, loading.seed, rank),  # type: ignore[arg-type]  # a data set of whole batches
        sampler=elements,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=loading.num_workers or 0,
        prefetch_factor=loading.prefetch_factor,
        pin_memory=pins_memory(loading),
        worker_init_fn=_WorkerStart(None if own is None else own.worker_init_fn, fetch.dataset),
        timeout=0 if own is None else own.timeout,
        multiprocessing_context=None if own is None else own.multiprocessing_context,
        generator=generator,
    )
    batches = iter(loader)
    try:
        yield from batches
    except IndexError as error:
        raise no_such_sample(len(fetch.dataset), error) from error
    except (RuntimeError, EOFError, OSError) as error:
        # An error of the data set says that it was caught; a dead worker cannot, and where the
        # batch was half way between two processes only the connection breaks.
        is_caught = str(error).startswith("Caught")
        if is_caught or (type(error) is RuntimeError and "DataLoader worker" not in str(error)):
            raise
        _end(batches)
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError.cannot(
            "read samples with these workers",
            why=f"one of them ended ({said})",
            instead="use fewer, or num_workers=0 to see an error of the data set; then resume",
        ) from error


def batched(spec: DataSpec, loading: Loading, chunk_size: int) -> Iterable[Any]:
    """Return the batches of an iterable; a torch `IterableDataset` yields samples."""
    data = spec.data
    if isinstance(data, IterableDataset):
        return DataLoader(
            data,
            batch_size=chunk_size,
            num_workers=loading.num_workers or 0,
            prefetch_factor=loading.prefetch_factor,
            collate_fn=loading.collate_fn,
            worker_init_fn=_WorkerStart(),
        )
    is_loader = isinstance(data, DataLoader)
    own = (data.num_workers, data.collate_fn) if is_loader else (0, None)
    if (loading.num_workers or 0) != own[0]:
        raise _not_here("num_workers", loading.num_workers, data)
    if loading.collate_fn is not own[1]:
        raise _not_here("collate_fn", loading.collate_fn, data)
    if is_loader and data.num_workers > 1 and not data.in_order:
        why, instead = "batches then come in an order that no resume can repeat", "leave it out"
        raise DataError.bad("in_order", value=False, why=why, instead=instead)
    # Copies of a data set in workers hear of the epoch only when the workers start.
    is_told = is_loader and hasattr(data.dataset, "set_epoch")
    if type(data) is DataLoader and data.num_workers:
        data = copy.copy(data)  # do not change the user's own
        data._iterator = None
        data.worker_init_fn = _WorkerStart(data.worker_init_fn)
        if is_told:
            data.__dict__["persistent_workers"] = False
    elif is_told and data.persistent_workers:
        why = "workers that stay are not told the epoch by set_epoch"
        raise DataError.bad("persistent_workers", value=True, why=why, instead="leave it out")
    batches: Iterable[Any] = data
    return batches


def _not_here(name: str, value: object, data: Any) -> DataError:
    why = f"data of type {type(data).__name__} are batches already"
    return DataError.bad(name, value, why, "leave it out, or write it in a DataLoader")


@final
class _Seeded:
    """Fetches each element with its own seed."""

    def __init__(self, fetch: Fetch, seed: int, rank: int) -> None:
        self._fetch = fetch
        self._seed = seed
        self._rank = rank

    def __getitem__(self, element: Element) -> Any:
        place, indices = element
        seed_generators(sample_seed(self._seed, -2 - self._rank, place))
        return self._fetch.batch(indices)


@final
class _WorkerStart:
    """The start of a worker: it will end with its rank, and calls the user's function.

    A forked worker holds the sockets of its rank: while it lives, other ranks do not see that their
    peer was killed. Torch's workers check their parent every 5 seconds; Linux can end them at once.
    For Linux, the parent is the thread that started them, so this only works in the main thread.
    """

    def __init__(
        self, function: Callable[[int], None] | None = None, dataset: Any | None = None
    ) -> None:
        self._function = function
        self._dataset = dataset
        self._is_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if sys.platform == "linux" and self._is_main_thread:
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if self._dataset is not None:
            # The user's function sees the user's own data set, not what is around it. The record
            # is frozen; that it names our wrapper is nothing for users.
            object.__setattr__(get_worker_info(), "dataset", self._dataset)
        if self._function is not None:
            self._function(worker)


def _end(batches: Iterator[Any]) -> None:
    """End the remaining workers here, not when the iterator is collected.

    The connection breaks just before the system reports the end of the worker. Torch then raises
    an error at any point; in a finalizer it could not be caught.
    """
    shutdown = getattr(batches, "_shutdown_workers", None)  # torch has no public way
    if shutdown is not None:
        with suppress(RuntimeError):
            shutdown()


def _as_it_is(batch: Any) -> Any:
    return batch
