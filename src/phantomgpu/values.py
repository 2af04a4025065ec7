"""Small tensors are computed for real: masks, indices, lengths, probabilities, losses.

A device's bytes lie in this process' memory (native/device.c), so a tensor on the device can be
read as one on the CPU. CUDA kernels are overridden through `torch.library`: first torch's own
kernel runs, whose allocations are the true ones; then the same operation runs on the CPU, and its
result is written to the device. What is larger is unknown: where the script reads such a number, it
gets a random one between 0 and 1, and the report names the place.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from phantomgpu import files
from phantomgpu.analysis import line_of
from phantomgpu.bound import Work, class_of

MOST = 4 << 20
"""Elements of whole numbers that are computed; bytes that a copy on the device keeps."""
FEW = 1 << 16
"""Elements of floating-point numbers that are computed."""
UNKNOWN: Counter[str] = Counter()
"""The places where the script read what hangs on unknown numbers."""
DECIDES: Counter[str] = Counter()
"""Those of them where the numbers are whole, or the size of a tensor or a branch hangs on them."""
_SIZED = (
    "equal nonzero masked_select _unique2 unique_consecutive unique_dim repeat_interleave bincount"
)
"""Operations whose values decide how large their output is, or a branch."""
_INDEXED = {"index_select": (2, None), "gather": (2, None), "nll_loss_forward": (1, -1)}
"""Which argument has indices, into which dimension (None: the second argument says so)."""
_LEFT = "empty set_ resize record_stream is_set_to _assert _amp_foreach _sdp_choice cudnn _use_"
"""Parts of names of what makes no values, or would make a scaler skip a step."""
_REFUSED = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)
"""The CPU has no such kernel or type, or indices that came from zeros lie outside."""
_KEPT: list[torch.library.Library] = []
_TRAINS: dict[tuple[int, int], bool] = {}
"""Whether the module that the script calls now has weights that are trained."""
LOST, _DERIVED, _KNOWN, _NORMAL = range(4)
"""What the bytes of a storage are: unknown, computed from unknown ones, true, or lost `randn`."""


class Share(float):
    """State of a large mask: what part of the elements are not zero, at unknown places."""

    def mask(self, like: torch.Tensor) -> torch.Tensor:
        """Return such a mask, with its elements spread evenly."""
        values = torch.zeros(like.numel(), dtype=like.dtype)
        count = round(self * like.numel())
        values[(torch.arange(count) / max(self, 1e-30)).long().clamp(max=like.numel() - 1)] = 1
        return values.view(like.shape)


class Same(float):
    """State of a large tensor, all of whose elements are this number."""


def start(
    library: ctypes.CDLL, modes: list[tuple[int, str]], work: Work | None = None
) -> Bytes | None:
    """Override the kernels; return None if this torch does not let us call its own (2.9 does)."""
    if not hasattr(torch.library, "get_kernel"):
        return None
    bytes_of = Bytes(library, modes)
    ours = torch.library.Library("aten", "IMPL")
    _KEPT.append(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for name in sorted({*_names(), "copy_"}):  # twice would call itself
            base, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            if base == "_local_scalar_dense":
                ours.impl(base, Hidden(bytes_of.number), "CUDA")
            elif base == "copy_" or (
                operation.has_kernel_for_dispatch_key("CUDA") and _makes_values(operation)
            ):
                ours.impl(name, Kernel(operation, bytes_of, work), "CUDA", with_keyset=True)
        real = torch.library.get_kernel("aten::_coalesce", "SparseCUDA").call_boxed
        ours.impl("_coalesce", partial(_coalesced, real), "SparseCUDA", with_keyset=True)
    if "torch._dynamo" in sys.modules:
        hide()
    return bytes_of


def hide() -> None:
    """Keep `torch.compile` from tracing what runs below torch's operations."""
    for kind in (Kernel, Hidden):
        kind.__call__ = torch.compiler.disable(kind.__call__)  # type: ignore[method-assign]


def _coalesced(real: Callable[..., torch.Tensor], keys: Any, sparse: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor with each index once: torch's kernel, which does not run, counts."""
    real(keys, sparse)  # for what it allocates
    indices, values = sparse._indices().cpu(), sparse._values()
    sizes, ones = sparse.shape[: len(indices)], torch.ones(indices.shape[1])
    counted = torch.sparse_coo_tensor(indices, ones, sizes, check_invariants=False).coalesce()
    places = counted.indices().to(values.device)
    sums = values.new_empty((places.shape[1], *values.shape[1:]))
    return torch.sparse_coo_tensor(
        places, sums, sparse.shape, is_coalesced=True, check_invariants=False
    )


def _names() -> list[str]:
    """Return the names of operations that may have a CUDA kernel, from torch's own table."""
    folder = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native"
    table = files.read(folder / "native_functions.yaml").decode()
    entries = table.split("\n- func: ")[1:]
    signs = ("CUDA", "structured_delegate", "_foreach")
    return [one.partition("(")[0] for one in entries if any(sign in one for sign in signs)]


def _makes_values(operation: Any) -> bool:
    schema = operation._schema
    is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
    is_odd = any(str(one.type) in ("Storage", "Stream") for one in schema.arguments)
    # `2.0 ** x` calls it with a number on the device, which torch cannot give to Python.
    is_odd = is_odd or schema.overload_name == "Tensor_Tensor_out"
    return not is_view and not is_odd and not any(part in schema.name for part in _LEFT.split())


class Hidden:
    """A function that `torch.compile` must not trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.function(*args, **kwargs)


class Kernel:
    """Runs an operation on the device, and for real where it is small."""

    def __init__(self, operation: Any, bytes_of: Bytes, work: Work | None = None) -> None:
        self.operation, self.bytes, self.work = operation, bytes_of, work
        self.boxed = torch.library.get_kernel(operation, "CUDA").call_boxed
        schema = operation._schema
        self.base = schema.name.removeprefix("aten::")
        places = [(at, one) for at, one in enumerate(schema.arguments) if "Tensor" in str(one.type)]
        self.numbers = [at for at, one in places if "List" not in str(one.type)]
        self.written = [
            (at, one.name) for at, one in places if one.alias_info and one.alias_info.is_write
        ]
        self.is_random = torch.Tag.nondeterministic_seeded in operation.tags
        self.names = [one.name for one in schema.arguments]
        self.class_ = class_of(self.base)
        self.is_out = schema.overload_name.endswith("out")
        self.overwrites = self.is_random or self.is_out or self.base in ("zero_", "fill_")
        # How many elements a mask of tokens has: `bernoulli(full(shape, 0.15))` in scripts.
        is_mask = self.base.startswith(("bernoulli", "fill_", "masked_fill"))
        self.few = MOST // 4 if is_mask else FEW
        self.is_light = self.class_ == "other kernels" and not self.is_random
        self.zeroes = schema.name == "aten::zero_" or str(operation) == "aten.fill_.Scalar"

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Run it, and count what it does unless another kernel called it."""
        work = self.work
        if work is None or work.is_busy:
            return self.run(keys, *args, **kwargs)
        work.is_busy = True
        try:
            out = self.run(keys, *args, **kwargs)
            with suppress(*_REFUSED):  # of what is odd, such as a sparse tensor, nothing is counted
                work.add(self, args, kwargs, out)
        finally:
            work.is_busy = False
        return out

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that it writes into."""
        return [
            one
            for at, name in self.written
            for one in leaves(args[at] if at < len(args) else kwargs.get(name))
        ]

    def run(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        self.bytes.watch()
        for at, one in enumerate(args):
            if at in self.numbers and isinstance(one, (int, float, complex)):
                args = (*args[:at], _tensor(one, args), *args[at + 1 :])
        tensors = leaves((args, kwargs))
        if len(_dense(tensors)) < len(tensors):
            return self.boxed(keys, *args, **kwargs)
        if self.base == "copy_":
            return self.copied(keys, *args, **kwargs)
        if self.base in _INDEXED:
            self.check(args)
        if self.base in _SIZED.split():
            return self.sized(keys, args, kwargs, tensors)
        if self.zeroes and args[0].is_contiguous() and not any(args[1:]):
            out = self.boxed(keys, *args, **kwargs)
            self.bytes.set(args[0].data_ptr(), 0, 1, args[0].nbytes)
            self.bytes.note(args[0], _KNOWN)
            return out
        targets = self.targets(args, kwargs)
        most = max((one.numel() for one in tensors), default=0)
        is_worth = self.is_worth(targets, most, tensors)
        host = self.on_host(args, kwargs, targets) if is_worth else None
        out = self.boxed(keys, *args, **kwargs)
        fresh = [one for one in _dense(leaves(out)) if not _among(one, targets)]
        most = max([most, *(one.numel() for one in fresh)])
        if host is None and not targets and self.is_worth(fresh, most, tensors):
            host = self.on_host(args, kwargs, targets)
        known = host is not None and host[3]
        if host is None or most > MOST or not self.computed(host, targets, fresh, most):
            # Asked once: what FSDP copies has thousands of tensors.
            is_masked = any(map(self.bytes.is_mask, [*tensors, *fresh]))
            for one in targets or [one for one in fresh if most > self.few]:
                self.bytes.note(one, self.share(one, (args, kwargs), tensors, is_masked=is_masked))
            known = False
        is_check = self.base in ("all", "any") and not known
        if is_check and (most > self.few or "distribution.py" in line_of(sys._getframe())[1]):
            # What is checked is finite and valid, and no sample is rejected.
            answer = torch.full_like(out, self.base == "all", device="cpu")
            self.bytes.write(out, answer, known=False)
        return out

    def check(self, args: tuple[Any, ...]) -> None:
        """Refuse indices that are known to lie outside, as the kernel's assertion does.

        Raises:
            RuntimeError: As on a GPU.
        """
        at, dim = _INDEXED[self.base]
        size = args[0].shape[args[1] if dim is None else dim] if args[0].dim() else 1
        if self.bytes.is_known(args[at]) and 0 < args[at].numel() <= MOST:
            values = self.bytes.read(args[at])
            is_left_out = (values == args[4]) if dim is not None else values.new_zeros(1).bool()
            outside = values[((values < 0) | (values >= size)) & ~is_left_out]
            if len(outside):
                remember(decides=True)  # the script may catch it
                why = f"index {outside[0].item()} of {size} places"
                raise RuntimeError(f"CUDA error: device-side assert triggered: {why}")

    def share(
        self, out: torch.Tensor, given: Any, read: list[torch.Tensor], *, is_masked: bool
    ) -> float:
        """Return what is known of a large result: for masks, how much of it is not zero."""
        args, kwargs = given
        if self.base in ("zero_", "normal_"):
            return _KNOWN if self.base == "zero_" else _NORMAL
        state = self.bytes.state(read[0]) if read else None
        if self.base == "fill_":
            number = self.bytes.read(torch.as_tensor(args[1])).item()
            return Same(number) if number else _KNOWN
        if self.base == "masked_fill_" and isinstance(state, Same) and 0 < state < 1:
            return state  # chances of tokens, but for a few
        if self.base in ("sum", "mean", "count_nonzero") and isinstance(state, Share):
            total = state * (1 if self.base == "mean" else read[0].numel())
            if out.numel() == 1:
                self.bytes.write(out, torch.tensor(total).view(out.shape), known=False)
                return _DERIVED
        if self.base.startswith(("scatter", "index_put", "_index_put")) and state == _KNOWN:
            places = [one.numel() for one in leaves(args) if one.dtype == torch.int64]
            return Share(min(1.0, max(places, default=0) / out.numel()))
        if not is_masked and not self.base.startswith(("bernoulli", "native_dropout")):
            return LOST
        both = len(read) == 1 and isinstance(state, Share)
        with suppress(*_REFUSED):
            drawn = {id(one): self.bytes.sample(one, out.shape, both=both) for one in read}
            result = leaves(self.called(*self.here(args, kwargs, drawn)))[0]
            parts = result.bool().float().expand(2 if both else FEW)
            part = parts[0].lerp(parts[1], state or 0.0) if both else parts.mean()
            return Share(part) if out.dtype is torch.bool or part < 1 else LOST
        return LOST

    def is_worth(self, outputs: list[torch.Tensor], most: int, read: list[torch.Tensor]) -> bool:
        """Return whether outputs are computed, if tensors have so many elements."""
        # The whole numbers of attention are seeds, and the CPU has no such kernels.
        is_whole = self.class_ != "attention" and any(map(_is_whole, outputs))
        if most <= self.few or most > MOST or is_whole:
            return bool(outputs) and most <= MOST
        return bool(outputs) and self.is_light and all(map(self.bytes.is_known, read))

    def on_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[torch.Tensor]
    ) -> tuple[Any, Any, list[torch.Tensor], bool]:
        """Return the arguments on the CPU, the copies of the targets, and whether they are true."""
        read = [one for one in leaves((args, kwargs)) if not _among(one, targets)]
        read += [] if self.overwrites else targets
        known = self.is_finite_check(args) or all(map(self.bytes.is_known, read))
        copies = {
            id(one): (
                host(one) if self.overwrites and one.is_cuda else self.bytes.read(one)
            ).clone()
            for one in targets
        }
        return (*self.here(args, kwargs, copies), [copies[id(one)] for one in targets], known)

    def is_finite_check(self, args: tuple[Any, ...]) -> bool:
        """Return whether this asks for nan or inf, as `isfinite` does: training has none."""
        if self.base not in ("eq", "ne") or len(args) == 1:
            return bool(self.base == "isnan")
        return args[1] is args[0] or (isinstance(args[1], float) and args[1] == math.inf)

    def here(self, args: Any, kwargs: Any, copies: dict[int, torch.Tensor]) -> Any:
        """Return arguments with tensors on the CPU: these copies, or what is read."""

        def moved(one: torch.Tensor) -> torch.Tensor:
            return copies[id(one)] if id(one) in copies else self.bytes.read(one)

        return mapped((args, kwargs), moved)

    def computed(
        self, here: Any, targets: list[torch.Tensor], fresh: list[torch.Tensor], most: int
    ) -> bool:
        """Compute on the CPU, and write to the device; return whether that was possible."""
        args, kwargs, copies, known = here
        if not known and ("linalg" in self.base or "cholesky" in self.base):
            return False  # a random matrix may not be positive definite, which is an error
        with suppress(*_REFUSED):
            results = leaves(self.called(args, kwargs))
            new = [one for one in results if not _among(one, copies)]
            pairs = [*zip(targets, copies, strict=True), *zip(fresh, new, strict=True)]
            for to, result in pairs:
                if not to.is_cuda or (most > self.few and not known and not _is_whole(to)):
                    share = Share(result.count_nonzero() / max(1, result.numel()))
                    self.bytes.note(to, share if share < 1 else LOST)
                else:
                    self.bytes.write(to, result, known=known)
            return True
        return False

    def called(self, args: Any, kwargs: Any) -> Any:
        """Call the operation on the CPU; chance there is not the script's."""
        if not self.is_random:
            return self.operation(*args, **kwargs)
        before = torch.get_rng_state()
        torch.set_rng_state(self.bytes.chance)
        try:
            return self.operation(*args, **kwargs)
        finally:
            self.bytes.chance = torch.get_rng_state()
            torch.set_rng_state(before)

    def sized(
        self, keys: Any, args: tuple[Any, ...], kwargs: Any, tensors: list[torch.Tensor]
    ) -> Any:
        """Return what has a size, or is a branch, that hangs on values."""
        here, there, _, known = self.on_host(args, kwargs, [])
        if not known:
            remember(decides=True)
        self.bytes.is_script = False  # the kernel itself may ask for a number that it counted
        try:
            self.boxed(keys, *args, **kwargs)  # for what it allocates
        finally:
            self.bytes.is_script = True
        device = next(one for one in tensors if one.is_cuda).device
        result = mapped(self.operation(*here, **there), lambda one: one.to(device))
        for one in leaves(result):
            self.bytes.note(one, _KNOWN if known else _DERIVED)
        return result

    def copied(
        self, keys: Any, to: torch.Tensor, source: torch.Tensor, *more: Any, **kwargs: Any
    ) -> Any:
        """Copy, between the devices too."""
        known = self.bytes.is_known(source)
        state = self.bytes.state(source)
        # A program on the CPU reads all of a copy: k-means must not see only zeros.
        is_kept = _is_whole(to) or not to.is_cuda or (known and source.is_cuda)
        is_small = to.numel() <= (MOST if is_kept else self.few)
        if isinstance(state, Share):
            is_small = not to.is_cuda
        values = self.bytes.read(source) if is_small else source
        if not to.is_cuda and not known:
            remember(decides=_is_whole(source))
        out = self.boxed(keys, to, source, *more, **kwargs)
        if is_small and to.is_cuda:
            self.bytes.write(to, values.expand(to.shape), known=known)
        elif is_small and not known:
            to.copy_(values)
        elif to.is_cuda:
            kept = to.dtype == source.dtype and to.nbytes <= MOST
            kept = kept and to.is_contiguous() and source.is_contiguous()
            if source.dtype is torch.bool and state == _DERIVED:
                state = Share(self.bytes.read(source).float().mean())
            lost = state if isinstance(state, Share) and to.numel() == source.numel() else LOST
            self.bytes.note(to, _KNOWN if known and kept else lost)
        return out


def _tensor(number: complex, args: tuple[Any, ...]) -> torch.Tensor:
    """Return a number as the tensor it was before it came to Python, with types promoted alike."""
    kind = torch.tensor(number).dtype
    like = next((one for one in args if isinstance(one, torch.Tensor)), None)
    if like is not None and like.dim() == 0 and torch.result_type(like, number) == like.dtype:
        kind = like.dtype
    return torch.tensor(number, dtype=kind)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that have a storage of their own."""
    return [one for one in tensors if one.layout is torch.strided and not one.is_nested]


def _among(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is one for one in tensors)


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return arguments or results with each tensor changed, and other devices than the CPU, too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([mapped(one, change) for one in value])
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results."""
    found, waiting = [], [value]
    for one in waiting:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple, dict)):  # faster than a union
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _mode_of(frame: FrameType | None, before: str) -> str:
    """Return what code without gradients is: evaluation of what is trained, or other.

    What comes after an evaluated model, such as metrics, is evaluation, too.
    """
    outer = None
    while frame is not None:
        outer = frame if frame.f_code.co_name == "_call_impl" else outer
        frame = frame.f_back
    if outer is None:
        return before or "no_grad"
    module = outer.f_locals["self"]
    if (call := (id(outer), id(module))) not in _TRAINS:  # a walk over all weights, once a call
        _TRAINS.clear()
        _TRAINS[call] = any(one.requires_grad for one in module.parameters())
    return "evaluation" if _TRAINS[call] and not module.training else "no_grad"


def remember(*, decides: bool) -> None:
    """Note the line of the script that reads an unknown number, and that of torch in it."""
    line, inner = line_of(sys._getframe())
    for counter in (UNKNOWN, DECIDES)[: 1 + decides]:
        counter[f"{line} ({inner})" if inner else line] += 1


def host(tensor: torch.Tensor, *, flat: bool = False) -> torch.Tensor:
    """Return a CPU tensor over the bytes of one on the device; flat: with what is in between."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    strides = tensor.stride()
    count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    size = count * tensor.element_size()
    buffer = (ctypes.c_char * size).from_address(tensor.data_ptr())
    whole = torch.frombuffer(buffer, dtype=tensor.dtype, count=count)
    return whole if flat else whole.as_strided(tensor.shape, strides)


class Bytes:
    """The bytes of the device, and what is known of them; of dead storages, they are zero again."""

    def __init__(self, library: ctypes.CDLL, modes: list[tuple[int, str]]) -> None:
        self.put, self.set = library.phantom_write, library.phantom_set
        self.connect = library.phantom_connect
        self.connect.argtypes = [ctypes.c_int, ctypes.c_long]
        self.put.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
        self.set.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
        self.set.restype = None
        self.states: dict[int, tuple[weakref.ref[torch.UntypedStorage], float]] = {}
        self.chance = torch.Generator().manual_seed(0).get_state()
        self.generator = torch.Generator().manual_seed(0)  # chance here is not the script's
        self.pool, self.is_script = torch.empty(0), True
        self.mode, self.modes, self.thread = "", modes, threading.get_ident()

    def watch(self) -> None:
        """Note where the script turns gradients off and on, and evaluates."""
        if threading.get_ident() != self.thread:  # autograd's own
            return
        mode = "" if torch.is_grad_enabled() else _mode_of(sys._getframe(2), self.mode)
        if mode != self.mode:
            self.mode = mode
            self.modes.append((time.time_ns() // 1000, mode))

    def state(self, tensor: torch.Tensor) -> float | None:
        """Return what its bytes are; None: nothing was noted."""
        storage = tensor.untyped_storage()
        known = self.states.get(storage.data_ptr())
        return known[1] if known is not None and known[0]() is storage else None

    def is_mask(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is true and false, or known to be zero in part."""
        return tensor.dtype is torch.bool or isinstance(self.state(tensor), Share)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has its true values."""
        if not tensor.is_cuda or not tensor.numel():
            return True
        state = self.state(tensor)
        return isinstance(state, Same) or (state == _KNOWN and not isinstance(state, Share))

    def note(self, tensor: torch.Tensor, state: float) -> None:
        """Note what the bytes of a tensor are, until its storage dies.

        What an older block left behind must not be read from a new one.
        """
        says_nothing = state == LOST and not isinstance(state, Share)
        if not tensor.is_cuda or ((old := self.state(tensor)) is None and says_nothing):
            return
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if tensor.nbytes < size and old is not None:  # a part of it
            state = _KNOWN if state == old == _KNOWN else _DERIVED

        def forget(dead: weakref.ref[torch.UntypedStorage]) -> None:
            if self.states.get(address, (None,))[0] is dead:
                del self.states[address]
                self.set(address, 0, 1, size)

        reference = weakref.ref(storage, forget) if old is None else self.states[address][0]
        self.states[address] = reference, state

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its values on the CPU: the true ones, or random ones between 0 and 1."""
        if not tensor.is_cuda:
            return tensor
        if not tensor.numel():
            return host(tensor)
        count, state = tensor.numel(), self.state(tensor)
        if isinstance(state, Share):
            return state.mask(tensor)
        if isinstance(state, Same):
            return torch.full((), state, dtype=tensor.dtype).expand(tensor.shape)
        if state in (_DERIVED, _KNOWN) or (_is_whole(tensor) and count <= 4 * MOST):
            return host(tensor)
        if count > MOST:
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if len(self.pool) < 2 * count:
            generator = torch.Generator().manual_seed(0)
            self.pool = 1 - torch.rand(max(2 * count, 4 * FEW), generator=generator)
        offset = tensor.data_ptr() // 512 * 997 % (len(self.pool) - count)  # equal to itself
        values = self.pool[offset : offset + count].view(tensor.shape)
        values = (torch.special.ndtri(values) if state == _NORMAL else values).to(tensor.dtype)
        if count <= FEW and tensor.nbytes == tensor.untyped_storage().nbytes():
            self.write(tensor, values, known=False)  # the same when it is read again
        return values

    def number(self, tensor: torch.Tensor) -> Any:
        """Return the value of a tensor with one element, once the device has got that far."""
        torch.cuda.current_stream().synchronize()
        if self.is_script and not self.is_known(tensor):
            remember(decides=_is_whole(tensor))
        return self.read(tensor).item()

    def sample(self, tensor: torch.Tensor, shape: torch.Size, *, both: bool) -> torch.Tensor:
        """Return some elements of a tensor for some of a larger one of that shape, or 0 and 1."""
        state = self.state(tensor)
        if both:
            return torch.tensor([0, 1]).to(tensor.dtype)
        if isinstance(state, Share):
            return (torch.rand(FEW, generator=self.generator) < state).to(tensor.dtype)
        is_lost = state in (None, LOST, _NORMAL) and not isinstance(state, Same)
        if tensor.dtype.is_floating_point and tensor.numel() > 1 and is_lost:
            draw = torch.randn if state == _NORMAL else torch.rand
            return draw(FEW, generator=self.generator).to(tensor.dtype)
        at = torch.randint(shape.numel(), (FEW,), generator=self.generator)
        return self.read(tensor).expand(shape)[torch.unravel_index(at, shape)]

    def write(self, to: torch.Tensor, result: torch.Tensor, *, known: bool) -> None:
        """Write values to the device, which then knows that these bytes are not zero."""
        if to.numel() == 0:
            return
        if to.is_contiguous():
            values = result.to(to.dtype).contiguous()
        else:
            values = host(to, flat=True).clone()
            values.as_strided(to.shape, to.stride()).copy_(result)
        is_kept = self.put(to.data_ptr(), values.data_ptr(), values.numel() * values.element_size())
        self.note(to, (_KNOWN if known else _DERIVED) if is_kept else LOST)
