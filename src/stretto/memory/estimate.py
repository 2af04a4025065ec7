"""Estimate: the bytes of the tensors of a step, on fake tensors that take no memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.data.containers import mapped, nodes
from stretto.errors import FitError, StrettoError, first_line
from stretto.memory import fakes
from stretto.memory.step import WholeStep, read, written
from stretto.runtime import TrainStep
from stretto.runtime.random_state import RandomState

Category = Literal[
    "parameters",
    "buffers",
    "optimizer",
    "gradients",
    "batch",
    "activations",  # of the forward pass, saved for the backward pass
    "temporaries",
]


class Estimate(NamedTuple):
    """The moments of a step at which its tensors take the most bytes."""

    size: int
    """Samples of the micro-batch."""
    by_phase: Mapping[str, Mapping[Category, int]]
    """The bytes at the peak of `forward`, `backward` and `optimizer`, by category."""

    @property
    def phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.by_phase, key=lambda phase: sum(self.by_phase[phase].values()))

    @property
    def by_category(self) -> Mapping[Category, int]:
        """The bytes at the highest peak, by category."""
        return self.by_phase[self.phase]

    @property
    def bytes(self) -> int:
        """The bytes at the highest peak."""
        return sum(self.by_category.values())


@final
class Estimator:
    """Runs a training step on fake tensors, and adds up the bytes of its tensors.

    It needs neither memory nor the device, and the model may be on the meta device. Model and
    optimizer do not change. Kernels that allocate for themselves, fragments of an allocator and
    libraries are not included, so it is an estimate.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> step = SupervisedStep(model, optimizer, lambda m, x: m(x).mean())
    >>> found = Estimator(step, lambda size: torch.ones(size, 1000)).at(1000)
    >>> 4_240_000 <= found.bytes <= 4_300_000, found.by_category["optimizer"]
    (True, 80088)

    Args:
        step: the training step.
        make_batch: makes a micro-batch of a given size; it is called once for each size, on fake
            tensors, so a large batch costs nothing.

    Raises:
        FitError: the step cannot be copied.
    """

    def __init__(
        self, step: TrainStep | WholeStep, make_batch: Callable[[int], Any], **how: Any
    ) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        data = written(WholeStep.of(step, **how))
        with self._mode:
            self._step: WholeStep = read(data, "cpu")
        self._make_batch = make_batch
        self._known: dict[int, Estimate] = {}

    def at(self, size: int) -> Estimate:
        """Return the estimate for a micro-batch of that size.

        Raises:
            FitError: the step cannot run on fake tensors; the message says why.
        """
        if size not in self._known:
            if not self._known:  # the first step makes the state of the optimizer
                self._run(min(size, 2))
            self._known[size] = self._run(size)
        return self._known[size]

    def _run(self, size: int) -> Estimate:
        state = RandomState.now()
        try:
            with self._mode, torch.compiler.set_stance("force_eager"), _uncollected():
                batch = mapped(self._fake, self._make_batch(size))
                trace = _Trace(self._step, batch)
                with trace:
                    self._step.run(batch, enter=trace.enter)
                return trace.estimate(size)
        except StrettoError:
            raise
        except Exception as error:  # a user's model may raise anything
            raise FitError.cannot(
                f"follow a step of {size} samples on fake tensors",
                why=first_line(error),
                instead="use method='try' on the device, or ask the phantom with gpu='h100'",
            ) from error
        finally:
            state.restore()

    def _fake(self, tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class _Block(NamedTuple):
    """The memory of a storage."""

    bytes: int
    phase: str


@final
class _Trace(TorchDispatchMode):
    """Records when each storage appears and when it is freed."""

    def __init__(self, step: WholeStep, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step
        self._blocks: list[_Block] = []
        self._categories: dict[int, Category] = {}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._changes: list[tuple[int, bool, str]] = []
        """A block, whether it is freed, and the phase."""
        self._phase = "before"
        self._add_all(step.step.parameters, "parameters")
        self._add_all(step.model.parameters(), "parameters")
        self._add_all(step.model.buffers(), "buffers")
        self._add_all(step.state_tensors(), "optimizer")
        self._add_all((one for one in nodes(batch) if isinstance(one, Tensor)), "batch")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_backward = torch._C._current_autograd_node() is not None
        if is_backward and self._phase == "forward":
            self._begin_backward()
        result = fakes.call(func, args, kwargs or {})
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor):
                self._add(one)
        return result

    def enter(self, phase: str) -> None:
        """Start a phase."""
        self._add_all(
            (p.grad for p in self._step.step.parameters if p.grad is not None), "gradients"
        )
        self._phase = phase

    def estimate(self, size: int) -> Estimate:
        """Return the moment with the most bytes."""
        self._add_all(self._step.state_tensors(), "optimizer")
        self._live.clear()
        total = 0
        peaks: dict[str, tuple[int, int]] = {}
        for number, (index, is_freed, phase) in enumerate(self._changes):
            total += -self._blocks[index].bytes if is_freed else self._blocks[index].bytes
            peaks[phase] = max(peaks.get(phase, (0, 0)), (total, -number))
        peaks.pop("before", None)
        return Estimate(size, {phase: self._sums(when) for phase, (_, when) in peaks.items()})

    def _sums(self, when: int) -> dict[Category, int]:
        """Return the bytes that are live after change number `-when`, by category."""
        past = self._changes[: 1 - when]
        live = {index for index, is_freed, _ in past if not is_freed}
        live -= {index for index, is_freed, _ in past if is_freed}
        sums: Counter[Category] = Counter()
        for index in sorted(live):
            sums[self._categories.get(index, "temporaries")] += self._blocks[index].bytes
        return dict(sums)

    def _begin_backward(self) -> None:
        """What is live of the forward pass is saved for the backward pass."""
        for index, _ in self._live.values():
            if self._blocks[index].phase == "forward":
                self._categories.setdefault(index, "activations")
        self._phase = "backward"

    def _add_all(self, tensors: Iterable[Tensor], category: Category) -> None:
        for tensor in tensors:
            self._add(tensor)
            known = self._live.get(id(tensor.untyped_storage()))
            if known is not None:
                self._categories[known[0]] = category

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, count = id(storage), storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if self._blocks[known[0]].bytes == count:
                return
            self._free(key)  # its memory was replaced, by resize_ or set_
        index = len(self._blocks)
        self._blocks.append(_Block(count, self._phase))
        self._changes.append((index, False, self._phase))
        self._live[key] = index, weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self._changes.append((known[0], True, self._phase))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection, which would free tensors at unpredictable times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
