"""Warns of what loops of your own commonly forget, from what can be seen without reading a device.

Hooks of torch's optimizers say when weights are updated. Everything else is looked at in the first
steps only.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.data.state import MicroBatch, Step

_MOST_STEPS: Final = 5
"""How many steps are looked at. Under loss scaling, the first few may be skipped."""
LOWEST_PEAK: Final = 0.01
"""The part of an optimizer's learning rate below which the peak of a schedule is a mistake."""


class _Noted(MicroBatch):
    """A micro-batch that says whether its weight was read, or what a loop may compute it from."""

    __slots__ = ("note",)
    note: Callable[[], None]

    def __getattribute__(self, name: str) -> Any:
        if name in ("weight", "num_samples"):
            object.__getattribute__(self, "note")()
        return super().__getattribute__(name)


class _Seen(NamedTuple):
    """A gradient at an update."""

    gradient: Tensor
    version: int
    passes: int


@final
class Mistakes:
    """Looks at the steps of one loop, and warns once of each mistake.

    Args:
        optimizers: those of the loop; each gets a hook, for as long as this object lives.
        model: the model, if it is known.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module | None) -> None:
        self._optimizers, self._model = optimizers, model
        self.updates = [0] * len(optimizers)
        """How often each optimizer has stepped since the last step was drawn."""
        self._num_steps = 0
        self._has_update = self._has_weight = self._is_uncleared = False
        self._is_set_elsewhere = False
        self._values: list[float] = []
        self._passes = 0
        self._seen: list[_Seen | None] = []
        """The gradient of one parameter at the first two updates; None: it has none."""
        own = weakref.ref(self)
        for number, one in enumerate(optimizers):

            def note(*_: Any, number: int = number) -> None:
                watching = own()
                if watching is not None:
                    watching.note_update(number)

            weakref.finalize(self, one.register_step_post_hook(note).remove)

    @property
    def is_new(self) -> bool:
        """Whether no step has ended yet."""
        return self._num_steps == 0

    def note_weight(self) -> None:
        """Note that the loop has read the weight of a micro-batch."""
        self._has_weight = True

    def note_update(self, number: int) -> None:
        """Note a step of an optimizer."""
        self.updates[number] += 1
        self._has_update = True
        if number == 0 and len(self._seen) < 2:
            groups = self._optimizers[0].param_groups
            first = next((p.grad for p in groups[0]["params"] if p.grad is not None), None)
            seen = None if first is None else _Seen(first, first._version, self._passes)
            self._seen.append(seen)
            if len(self._seen) == 2:
                self._is_uncleared = self._has_kept(*self._seen)
                self._seen = [None, None]

    def begin(self, step: Step, read: Callable[[], list[float]] | None) -> None:
        """Note what was set for a step, and watch its weights."""
        self.updates, self._values = [0] * len(self.updates), []
        if self._num_steps >= _MOST_STEPS:
            return
        self._values = [] if read is None or self._is_set_elsewhere else read()
        self._passes = len(step.micro_batches)
        if not self._has_weight and any(one.weight not in (0, 1) for one in step.micro_batches):
            step.micro_batches = [self._noted(one) for one in step.micro_batches]

    def _noted(self, micro: MicroBatch) -> MicroBatch:
        noted = _Noted.__new__(_Noted)
        noted.note = self.note_weight
        noted.batch, noted.num_tokens = micro.batch, micro.num_tokens
        noted.num_samples, noted.weight = micro.num_samples, micro.weight
        return noted

    def check_values(self, read: Callable[[], list[float]] | None) -> None:
        """Warn if values are not as the run has set them; called after a step, and before one."""
        if read is not None and self._values and self._values != read():
            self._values, self._is_set_elsewhere = [], True
            _warn(
                "something else has set a scheduled value, such as the learning rate, which the "
                "run sets for each step; leave the other scheduler out, or take 'lr' out of "
                "schedules"
            )

    def finish(self, step: Step, read: Callable[[], list[float]] | None, *, is_done: bool) -> None:
        """Look after a step."""
        if self._num_steps >= _MOST_STEPS:
            return
        self._num_steps += 1
        self.check_values(read)
        is_last = is_done or self._num_steps == _MOST_STEPS
        if self._num_steps == 1 and self._model is not None and not self._model.training:
            _warn("the model is in eval mode; call model.train() before the loop")
        if any(type(one) is _Noted for one in step.micro_batches) and not self._has_weight:
            self._has_weight = True
            _warn(
                "the weights of micro-batches were not read, so the gradient is not that of the "
                "batch; write (loss * micro.weight).backward()"
            )
        if self._is_uncleared:
            self._is_uncleared = False
            _warn("gradients were not cleared; call optimizer.zero_grad() after optimizer.step()")
        if max(self.updates, default=0) > 1:
            self._num_steps = _MOST_STEPS
            _warn("optimizer.step() was called more than once in a step; call it before finish()")
        elif is_last and not self._has_update:
            _warn(
                f"optimizer.step() was not called in {self._num_steps} steps; call it before "
                "finish()"
            )

    def _has_kept(self, one: _Seen | None, other: _Seen | None) -> bool:
        """Return whether the gradient of the first step was not cleared.

        It then gets one more change than in the first step: its first pass adds, too. Clearing in
        place is one more. Whatever else changes it, such as clipping, does so in both steps.
        """
        if one is None or other is None or one.gradient is not other.gradient:
            return False
        return one.passes == other.passes and other.version - one.version == one.version + 1


def warn_of_peak(rates: Iterable[float], base: float) -> None:
    """Warn if all learning rates of a run are far below that of its optimizer."""
    peak = max(rates, default=0.0)
    if 0 < peak < LOWEST_PEAK * base:
        _warn(
            f"the learning rate is at most {peak:.3g}, and the optimizer's is {base:.3g}: "
            "schedules are factors of the optimizer's; write Cosine(1, 0.1) to begin with its own"
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
