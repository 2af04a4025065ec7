"""Out of memory: which errors say so, on any device, wrapped or chained; and how to free it all.

The type says it (`torch.OutOfMemoryError`, `MemoryError`), or the text of a `RuntimeError`: the
libraries below torch (cuBLAS, cuDNN, oneDNN, NCCL, the drivers) report it with names of their own.
An error that left the device unusable is never taken for one, whatever it was raised from.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, final

import torch

from stretto.errors import StrettoError

T = TypeVar("T")
_TEXTS = re.compile(
    r"out of memory"  # CUDA, HIP, XPU, MPS, NCCL's "Cuda failure 'out of memory'"
    r"|OutOfMemory"  # hipErrorOutOfMemory, and errors that quote the type of another
    r"|DefaultCPUAllocator|bad_?alloc"
    r"|cannot allocate memory"  # the system's own text for ENOMEM, as mmap reports it
    # CUBLAS_STATUS_ALLOC_FAILED and its kin of cuDNN, cuFFT, cuSPARSE, hipBLAS and MIOpen;
    # cuDNN 9 says CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED.
    r"|alloc_?failed|allocation_failed|rocblas_status_memory_error"
    # oneDNN. Its message for unsupported shapes continues with "descriptor".
    r"|could not create a primitive(?! descriptor)"
    # Intel's drivers: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY, PI_ERROR_OUT_OF_RESOURCES.
    r"|out_of_(host|device)_memory|(PI|UR_RESULT)_ERROR_OUT_OF_RESOURCES",
    re.IGNORECASE,
)
_TEXTS_IN_FINDER = re.compile(
    # A workspace that does not fit leaves cuDNN without an engine, and a library whose handle does
    # not fit says that it was not initialised.
    r"CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine|could not create a primitive"
    r"|(CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"
    # Batches of more elements than a kernel, its grid or an address can count.
    r"|32.?bit.?index|storage size calculation overflow|INT_MAX|invalid configuration argument",
    re.IGNORECASE,
)
_FATAL = re.compile(
    r"illegal memory access|illegal address|device-side assert|device assert|misaligned address"
    r"|illegal instruction|unspecified launch failure|uncorrectable ECC",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException, *, in_finder: bool = False) -> bool:
    """Return whether an error says that memory ran out.

    An error that was raised `from` such a one says it too, as does a `RuntimeError` that replaced
    one while it was handled, and a group of nothing else. Errors of stretto's own never do: by then
    what to do about it has been decided.

    Args:
        error: what was caught.
        in_finder: whether the size of the batch is what is being tried. Then errors count that are
            only likely to come from too large a batch, such as cuDNN finding no engine.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    False
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_out_of_memory(inner, in_finder=in_finder) for inner in error.exceptions)
    try:
        chain = list(_chain(error))
        runtime = [str(cause) for cause in chain if isinstance(cause, RuntimeError)]
        if not isinstance(error, Exception) or any(map(_FATAL.search, runtime)):
            return False
        return any(_says_so(cause, in_finder=in_finder) for cause in chain)
    except MemoryError:  # the error still holds all of it: not enough is left to read what it says
        return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that it was raised from."""
    seen = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if isinstance(current, StrettoError):
            return
        following = current.__cause__
        # An error of another kind, raised while one was handled, is a mistake in the handler.
        if following is None and not current.__suppress_context__ and _is_general(current):
            following = current.__context__
        current = following


def _is_general(error: BaseException) -> bool:
    own = (NotImplementedError, RecursionError)
    return isinstance(error, RuntimeError) and not isinstance(error, own)


def _says_so(error: BaseException, *, in_finder: bool) -> bool:
    if isinstance(error, StrettoError):
        return False
    if isinstance(error, BaseExceptionGroup):
        return is_out_of_memory(error, in_finder=in_finder)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    texts = (_TEXTS, _TEXTS_IN_FINDER) if in_finder else (_TEXTS,)
    return _is_general(error) and any(text.search(str(error)) for text in texts)


@final
@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """The outcome of some work: its result, or an out-of-memory error."""

    result: T | None
    """What it returned; None if memory ran out."""
    out_of_memory: str | None
    """The error's message; None if there was none. The error and its frames are released."""


def attempt(work: Callable[[], T], *, in_finder: bool = False) -> Attempt[T]:
    """Do some work; if memory runs out, release all that it used.

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
    said = type(error).__name__
    with contextlib.suppress(MemoryError):
        said = str(error) or said
    _let_go(error)
    return said


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
    with contextlib.suppress(OSError, AttributeError):
        # MKL keeps the scratch of every shape that it has multiplied. Its `mkl_free_buffers` has
        # this name in the library of torch, of which only builds with MKL have it.
        if scratch:
            library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
            ctypes.CDLL(str(library)).mkl_serv_free_buffers()
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps what was freed below the top of its heap; other C libraries have no such call.
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


def _let_go(error: BaseException) -> None:
    """Clear the local variables of all frames that an error, and those behind it, came through."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        waiting += [
            other for other in (current.__cause__, current.__context__) if other is not None
        ]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
        # The frames that are still running, ours among them, refuse and are skipped.
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has used so far.

    Of an accelerator, those of tensors in torch's allocator; else the resident set size.

    >>> peak_memory(torch.device("cpu")) > 1 << 20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device)
    with contextlib.suppress(OSError, ValueError, IndexError):  # no such file outside of Linux
        text = Path("/proc/self/status").read_text("utf-8")
        return int(text.partition("VmHWM:")[2].split()[0]) << 10
    with contextlib.suppress(ImportError):  # Windows
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    return 0
