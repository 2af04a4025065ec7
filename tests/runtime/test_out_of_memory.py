"""What says that memory ran out, and what does not."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stretto.errors import FitError, TrainingError, cannot
from stretto.runtime.out_of_memory import attempt, is_out_of_memory

TEXTS = {
    "cuda": "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7 GiB",
    "cuda driver": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "hip": "HIP out of memory. Tried to allocate 256.00 MiB (GPU 0; 63.98 GiB total capacity)",
    "hip driver": "HIP error: hipErrorOutOfMemory",
    "xpu": "XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15 GiB",
    "xpu driver": "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "xpu runtime": "level_zero backend failed: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "mps": "MPS backend out of memory (MPS allocated: 18.00 GB, max allowed: 18.13 GB)",
    "cpu": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 800000000 bytes. Error code 12 (Cannot allocate memory)",
    "cpu on windows": "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough "
    "memory: you tried to allocate 12 bytes.",
    "mmap": "unable to mmap 1048576 bytes from file </torch_1>: Cannot allocate memory (12)",
    "c++": "std::bad_alloc",
    "onednn": "could not create a primitive",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cudnn 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cufft": "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusparse": "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "hipblas": "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "rocblas": "rocblas error: rocblas_status_memory_error",
    "miopen": "miopenStatusAllocFailed",
    "nccl": "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    "jax": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "compiled": "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory.",
}
ONLY_IN_A_FINDER = {
    "cudnn workspace": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you "
    "passed in a non-contiguous input.",
    "cudnn engine": "Unable to find an engine to execute this computation",
    "cudnn engine 9": "FIND was unable to find an engine to execute this computation",
    "cublas handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`",
    "index": "input tensor must fit into 32-bit index math",
    "index check": "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output)",
    "size": "Storage size calculation overflowed with sizes=[1152921504606846976, 1024]",
    "nonzero": "nonzero is not supported for tensors with more than INT_MAX elements",
    "grid": "CUDA error: invalid configuration argument",
    "onednn descriptor": "could not create a primitive descriptor for a convolution",
}
OTHERS = {
    "shape": "mat1 and mat2 shapes cannot be multiplied (4x3 and 2x2)",
    "illegal access": "CUDA error: an illegal memory access was encountered",
    "device assert": "CUDA error: device-side assert triggered",
    "illegal address": "CUDA error: misaligned address",
    "shared memory": "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible "
    "that dataloader's workers are out of shared memory.",
    "kernel resources": "CUDA error: too many resources requested for launch",
    "graph": "Trying to backward through the graph a second time",
    "dead": "DataLoader worker (pid 7) is killed by signal: Killed.",
    "empty": "",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_of_every_backend(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(RuntimeError(text.upper()))
    assert is_out_of_memory(RuntimeError(f"Caught RuntimeError in replica 1.\n{text}"))
    # Only a RuntimeError's text is read: another kind of error may quote anything.
    assert not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(NotImplementedError(text))


@pytest.mark.parametrize("text", ONLY_IN_A_FINDER.values(), ids=ONLY_IN_A_FINDER)
def test_what_only_a_finder_may_take_for_it(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text), in_finder=True)
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("in_finder", [False, True])
@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_nothing_else(text: str, in_finder: bool) -> None:
    assert not is_out_of_memory(RuntimeError(text), in_finder=in_finder)


def test_types() -> None:
    class OwnMemoryError(MemoryError):
        pass

    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OwnMemoryError("no text that is known"))
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "out of memory"))
    assert not is_out_of_memory(KeyboardInterrupt("out of memory"))
    assert not is_out_of_memory(SystemExit("out of memory"))
    assert not is_out_of_memory(RecursionError("out of memory"))


def test_where_not_even_the_text_can_be_read_memory_is_out() -> None:
    class UnreadableError(RuntimeError):
        def __str__(self) -> str:
            raise MemoryError

    assert is_out_of_memory(UnreadableError())

    def work() -> None:
        raise UnreadableError

    assert attempt(work).out_of_memory == "UnreadableError"


def test_errors_of_our_own_are_decisions() -> None:
    assert not is_out_of_memory(
        FitError(cannot("fit 1 sample", why="out of memory", instead="wait"))
    )
    error = TrainingError(cannot("go on", why="it is late", instead="wait"))
    error.__cause__ = torch.OutOfMemoryError()
    assert not is_out_of_memory(error)
    outer = RuntimeError("a step failed")
    outer.__cause__ = error
    assert not is_out_of_memory(outer)


def caught(work: Callable[[], object]) -> BaseException:
    try:
        work()
    except Exception as error:  # noqa: BLE001  any error is what is asked for
        return error
    raise AssertionError("nothing was raised")


def raise_from(new: Exception, old: Exception | None) -> None:
    raise new from old


def raise_while(new: Exception, old: Exception) -> None:
    try:
        raise old
    except type(old):
        raise new  # noqa: B904  what is tested


def test_wrapped_ones() -> None:
    oom = torch.OutOfMemoryError("CUDA out of memory")
    wrapped = caught(lambda: raise_from(ValueError("step 7 failed"), oom))
    assert is_out_of_memory(wrapped)
    assert is_out_of_memory(caught(lambda: raise_from(KeyError("x"), wrapped)))  # type: ignore[arg-type]
    assert not is_out_of_memory(caught(lambda: raise_from(ValueError("x"), ValueError("y"))))


def test_chained_ones() -> None:
    assert is_out_of_memory(caught(lambda: raise_while(RuntimeError("step"), MemoryError())))
    # A mistake in what handled it is a mistake, and so is what was said to have no cause.
    assert not is_out_of_memory(caught(lambda: raise_while(TypeError("oops"), MemoryError())))

    def hidden() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("decided") from None

    assert not is_out_of_memory(caught(hidden))


def test_a_device_that_is_broken_is_never_tried_again() -> None:
    text = "CUDA error: an illegal memory access was encountered"
    oom = torch.OutOfMemoryError("CUDA out of memory")
    assert not is_out_of_memory(caught(lambda: raise_while(RuntimeError(text), oom)))
    assert not is_out_of_memory(caught(lambda: raise_from(oom, RuntimeError(text))), in_finder=True)


def test_groups_are_all_or_nothing() -> None:
    oom, other = MemoryError(), ValueError("x")
    assert is_out_of_memory(ExceptionGroup("ranks", [oom, RuntimeError("std::bad_alloc")]))
    assert is_out_of_memory(ExceptionGroup("ranks", [ExceptionGroup("inner", [oom])]))
    assert not is_out_of_memory(ExceptionGroup("ranks", [oom, other]))
    assert is_out_of_memory(
        caught(lambda: raise_from(RuntimeError("x"), ExceptionGroup("g", [oom])))
    )
    assert not is_out_of_memory(
        caught(lambda: raise_from(RuntimeError("x"), ExceptionGroup("g", [oom, other])))
    )
    assert not is_out_of_memory(BaseExceptionGroup("g", [KeyboardInterrupt(), oom]))


def test_a_chain_that_goes_in_a_circle_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_real_ones() -> None:
    assert is_out_of_memory(caught(lambda: np.empty(2**59, np.uint8)))
    error = caught(lambda: torch.empty(2**59, dtype=torch.uint8))
    assert is_out_of_memory(error)
    assert is_out_of_memory(pickle.loads(pickle.dumps(error)))
    assert not is_out_of_memory(caught(lambda: torch.ones(2) @ torch.ones(3)))
    assert not is_out_of_memory(caught(lambda: torch.empty(-1)))
    assert is_out_of_memory(caught(lambda: torch.empty(2**61, 2**10)), in_finder=True)
