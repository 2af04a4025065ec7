"""Small whole numbers are computed for real: masks, indices, lengths, counts.

A device's bytes lie in this process' memory (native/device.c), so a tensor on the device can be
read as one on the CPU. Some CUDA kernels are overridden through `torch.library`: first torch's own
kernel runs, whose allocations are the true ones; then the same operation runs on the CPU, and its
result is written to the device. Floating-point results are zero.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from typing import Any

import torch

MOST = 4 << 20
"""Elements, and bytes, of tensors that are computed. The device keeps no larger copies."""
FEW = 4096
"""Elements of floating-point tensors that are filled or copied for real."""
# Operations with a kernel for CUDA, in torch 2.13 and 2.14.
_BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode floor_divide remainder.Tensor "
    "fmod.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor "
    "bitwise_right_shift.Tensor eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar "
    "le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar pow.Tensor_Scalar "
    "pow.Tensor_Tensor"
)
_UNARY = "bitwise_not neg sign clamp clamp.Tensor clamp_min clamp_max cumsum cumprod tril triu"
_OTHERS = (
    "abs.out logical_and.out logical_or.out logical_xor.out logical_not.out maximum minimum isnan "
    "isposinf isneginf rsub.Tensor pow.Scalar remainder.Scalar_Tensor copy_ fill_.Scalar "
    "fill_.Tensor zero_ cat index.Tensor _index_put_impl_ gather scatter.src scatter.value "
    "scatter_.src scatter_.value scatter_add scatter_add_ scatter_reduce_.two index_select "
    "index_add index_add_ index_fill_.int_Scalar masked_fill_.Scalar masked_fill_.Tensor "
    "masked_scatter_ where.self where.self_out flip roll arange.start_out eye.m_out "
    "randperm.generator_out tril_indices triu_indices sum.dim_IntList prod prod.dim_int max "
    "max.dim min min.dim amax amin aminmax any any.dim any.dims all all.dim all.dims argmax argmin "
    "sort.stable topk searchsorted.Tensor bucketize.Tensor isin.Tensor_Tensor isin.Tensor_Scalar "
    "equal count_nonzero.dim_IntList take add.out sub.out mul.out eq.Tensor_out eq.Scalar_out "
    "ne.Scalar_out lt.Scalar_out gt.Scalar_out le.Scalar_out ge.Scalar_out sum.IntList_out "
    "any.out all.out cat.out max.unary_out cumsum.out linspace.out bitwise_and.Tensor_out "
    "bitwise_or.Tensor_out index_select.out gather.out"
)
SIZED = (
    "nonzero masked_select _unique2 unique_consecutive unique_dim repeat_interleave.Tensor bincount"
)
"""Operations whose values decide how large their output is."""
_PLAIN = ("fill_", "zero_", "copy_", "cat", "arange", "eye", "linspace")
_REFUSED = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)
"""The CPU has no such kernel or type, or indices that came from zeros lie outside."""
_KEPT: list[torch.library.Library] = []


def start(library: ctypes.CDLL) -> bool:
    """Override the kernels; return False if this torch does not let us call its own (2.9 does)."""
    if not hasattr(torch.library, "get_kernel"):
        return False
    bytes_of = Bytes(library)
    ours = torch.library.Library("aten", "IMPL")
    _KEPT.append(ours)
    names = [*_BINARY.split(), *_UNARY.split(), *_OTHERS.split(), *SIZED.split()]
    for name in (*_BINARY.split(), *_UNARY.split()):
        base, dot, overload = name.partition(".")
        names.append(f"{base}_{dot}{overload}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, base, None)
            operation = getattr(packet, overload or "default", None)
            if operation is not None:
                kernel = _override(name, operation, bytes_of)
                ours.impl(name, kernel, "CUDA", with_keyset=True)
    return True


def _override(name: str, operation: Any, bytes_of: Bytes) -> Callable[..., Any]:
    boxed = torch.library.get_kernel(operation, "CUDA").call_boxed
    base, _, overload = name.partition(".")
    num_tensors = _num_tensors(base, overload)

    def original(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(map(isinstance, args[:num_tensors], repeat(torch.Tensor))):
            first = [
                _tensor(one, args) if isinstance(one, int | float | complex) else one
                for one in args[:num_tensors]
            ]
            args = (*first, *args[num_tensors:])
        return boxed(keys, *args, **kwargs)

    mutates = base.endswith("_") or overload.endswith("out")
    plain, sized = base in _PLAIN, name in SIZED.split()

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = leaves((args, kwargs))
        if sized:
            original(keys, *args, **kwargs)  # for what it allocates
            device = next(t for t in tensors if t.is_cuda).device
            return _map(operation(*_cpu(args, zeros=True), **_cpu(kwargs, zeros=True)), device)
        if not all(t.numel() <= MOST and t.layout is torch.strided for t in tensors):
            return original(keys, *args, **kwargs)  # the device keeps no such copies either
        before = None
        with suppress(*_REFUSED):
            if mutates and any(_computed(t, plain=plain) for t in tensors):
                before = _cpu(args, clone=True), _cpu(kwargs, clone=True)
        out = original(keys, *args, **kwargs)
        if base == "copy_":
            bytes_of.mind(args[0])
        if base == "equal":
            return operation(*_cpu(args))
        outputs = leaves(out)
        if any(_computed(t, plain=plain) for t in outputs):
            with suppress(*_REFUSED):
                cpu_args, cpu_kwargs = before or (_cpu(args), _cpu(kwargs))
                results = leaves(operation(*cpu_args, **cpu_kwargs))
                for to, result in zip(outputs, results, strict=True):
                    if _computed(to, plain=plain) and to.is_cuda:
                        bytes_of.write(to, result)
        return out

    return kernel


def _num_tensors(base: str, overload: str) -> int:
    """Return how many of the first arguments are tensors that may come as numbers."""
    if base in ("where", "clamp", "clamp_", "masked_fill_") and overload not in ("", "Scalar"):
        return 3
    of_tensors = overload.startswith("Tensor") and not overload.endswith("Scalar")
    named = base.removesuffix("_") in (
        *("floor_divide", "maximum", "minimum", "copy", "add", "sub", "mul"),
        *("logical_and", "logical_or", "logical_xor"),
    )
    return 2 if of_tensors or named else 0


def _tensor(number: complex, args: tuple[Any, ...]) -> torch.Tensor:
    """Return a number as the tensor it was before it came to Python, with types promoted alike."""
    like = next(one for one in args if isinstance(one, torch.Tensor))
    kind = torch.tensor(number).dtype
    if like.dim() == 0 and torch.result_type(like, number) == like.dtype:
        kind = like.dtype
    return torch.tensor(number, dtype=kind)


def _computed(tensor: torch.Tensor, *, plain: bool) -> bool:
    """Return whether the values of a tensor are kept."""
    if tensor.numel() * tensor.element_size() > MOST:
        return False
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return whole or (plain and tensor.numel() <= FEW)


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for one in value for tensor in leaves(one)]


def _cpu(value: Any, *, clone: bool = False, zeros: bool = False) -> Any:
    """Return arguments with tensors on the CPU, over the bytes of the device."""
    if isinstance(value, torch.Tensor):
        if zeros and value.numel() > 4 * MOST:
            return torch.zeros(value.shape, dtype=value.dtype)
        tensor = host(value) if value.is_cuda else value
        return tensor.clone() if clone else tensor
    if isinstance(value, dict):
        return {key: _cpu(one, clone=clone, zeros=zeros) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_cpu(one, clone=clone, zeros=zeros) for one in value])
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _map(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return type(value)([_map(one, device) for one in value])


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the bytes of one on the device."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    strides = tensor.stride()
    count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    size = count * tensor.element_size()
    buffer = (ctypes.c_char * size).from_address(tensor.data_ptr())
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=count)
    return flat.as_strided(tensor.shape, strides)


class Bytes:
    """Writes to the device; when a storage dies, its bytes are zero again."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.copy, self.set = library.phantom_copy, library.phantom_set
        self.copy.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
        self.set.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
        self.copy.restype = self.set.restype = None
        self.minded: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def mind(self, tensor: torch.Tensor) -> None:
        """Zero the bytes of a tensor on the device when nothing holds them any more.

        What an older block left behind must not be read from a new one.
        """
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        known = self.minded.get(address)
        if not tensor.is_cuda or (known is not None and known() is storage):
            return

        def forget(dead: weakref.ref[torch.UntypedStorage]) -> None:
            if self.minded.get(address) is dead:
                del self.minded[address]
                self.set(address, 0, 1, size)

        self.minded[address] = weakref.ref(storage, forget)

    def write(self, to: torch.Tensor, result: torch.Tensor) -> None:
        """Write values to the device, which then knows that these bytes are not zero."""
        if to.numel() == 0:
            return
        if to.is_contiguous():
            values = result.to(to.dtype).contiguous()
        else:  # with what lies between the elements
            view = host(to)
            count = 1 + sum((n - 1) * s for n, s in zip(to.shape, to.stride(), strict=True))
            values = view.as_strided((count,), (1,)).clone()
            values.as_strided(to.shape, to.stride()).copy_(result)
        self.copy(to.data_ptr(), values.data_ptr(), values.numel() * values.element_size())
        self.mind(to)
