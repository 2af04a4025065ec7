"""Giving memory back after it ran out: frames hold tensors, caches hold blocks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, final

import torch

from stretto.memory.measuring.recognise import is_out_of_memory

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """What came of a piece of work: its result, or that memory ran out."""

    result: T | None
    """What it returned; None where memory ran out."""
    out_of_memory: str | None
    """What the error said; None where there was none. The error itself is gone, with its frames."""


def attempt(work: Callable[[], T], *, in_finder: bool = False) -> Attempt[T]:
    """Do some work; if memory runs out, give back all that it held.

    Every other error passes. What the caller itself holds (a batch, gradients) is not touched: drop
    it and call `release_memory` again.

    Args:
        work: what to do.
        in_finder: see `is_out_of_memory`.

    >>> attempt(lambda: 6 * 7).result
    42
    >>> attempt(lambda: torch.empty(2**58)).out_of_memory[:24]
    '[enforce fail at alloc_c'
    """
    try:
        return Attempt(work(), None)
    except Exception as error:  # noqa: BLE001  others are raised again
        said = out_of_memory_text(error, in_finder=in_finder)
    release_memory()
    return Attempt(None, said)


def out_of_memory_text(error: Exception, *, in_finder: bool = False) -> str:
    """Return what an out-of-memory error says, and free what its frames hold; raise any other.

    Leave the `except` block before you release memory: while an error is handled, the interpreter
    holds it, and through its traceback every frame and every tensor in them.
    """
    if not is_out_of_memory(error, in_finder=in_finder):
        raise error
    said = _said(error)
    _let_go(error)
    return said


def _said(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except MemoryError:
        return type(error).__name__


def release_memory(*, scratch: bool = True) -> None:
    """Give back what nothing refers to: cycles, caches, MKL's scratch, free parts of the heap.

    Args:
        scratch: whether MKL's too, which the next step asks for again.

    >>> release_memory()
    """
    torch.clear_autocast_cache()
    gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        if getattr(module, "is_initialized", lambda: True)():
            module.empty_cache()
    if scratch:
        _free_scratch()
    _trim_heap()


def _let_go(error: BaseException) -> None:
    """Clear the local variables of all frames that an error, and those behind it, came through."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        # The frames that are still running, ours among them, refuse and are skipped.
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _free_scratch() -> None:
    # MKL keeps the scratch of every shape that it has multiplied. Its `mkl_free_buffers` has this
    # name in the library of torch, of which only builds with MKL have it.
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(library)).mkl_serv_free_buffers()


def _trim_heap() -> None:
    if sys.platform != "linux":
        return
    # glibc keeps what was freed below the top of its heap; other C libraries have no such call.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
