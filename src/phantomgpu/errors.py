"""Errors of phantomgpu.

PhantomError (RuntimeError)
    UnknownGPUError (ValueError)
    NotSupportedError        this system cannot run a phantom
    SetupNeededError         torch has no CUDA code here
    RunFailedError           the script failed, but not for lack of memory
"""

from __future__ import annotations


class PhantomError(RuntimeError):
    """Base of all errors of this package."""


class UnknownGPUError(PhantomError, ValueError):
    """No kind of GPU has that name."""


class NotSupportedError(PhantomError):
    """This system cannot run a phantom."""


class SetupNeededError(PhantomError):
    """The installed torch has no CUDA code."""


class RunFailedError(PhantomError):
    """A run ended before its memory was known."""
