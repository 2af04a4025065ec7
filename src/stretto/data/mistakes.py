"""Warns of what loops of your own commonly forget, from what can be seen without reading a device.

A hook of torch says when weights are updated. All else is looked at in the first steps only.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, Final, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from stretto.data.step import MicroBatch, Step

_MOST_STEPS: Final = 20
"""How many steps are looked at. Under loss scaling, the first few may be skipped."""


@cache
def _loops() -> weakref.WeakSet[LoopMistakes]:
    """Return the loops that are looked at, for which there is one hook that stays.

    If a hook were removed with its loop, a garbage collection while torch goes through its hooks
    would end the user's step with `RuntimeError: OrderedDict mutated during iteration`.
    """
    loops = weakref.WeakSet[LoopMistakes]()

    def note(optimizer: Optimizer, *_: Any) -> None:
        for loop in tuple(loops):
            loop._note_update(optimizer)

    register_optimizer_step_post_hook(note)
    return loops


@final
class LoopMistakes:
    """Looks at the steps of one loop, and warns once of each mistake.

    Args:
        optimizers: those of the loop.
        model: the model, if it is known.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module | None) -> None:
        self._optimizers, self._model = optimizers, model
        self.updates = [0] * len(optimizers)
        """How often each optimizer has stepped since the last step was drawn."""
        self._num_steps = 0
        self._has_update = self._has_weight = self._needs_weight = False
        self._is_in_eval_mode = self._is_set_elsewhere = False
        self._values: list[float] = []
        self._kept: _Kept | None = None
        # An optimizer around another, as Accelerate's, has its weights, and may have no hooks.
        self._numbers = {_first(one): number for number, one in enumerate(optimizers)}
        self._numbers |= {id(one): number for number, one in enumerate(optimizers)}
        self._steppers: dict[int, int] = {}
        self._kinds = [_noting(kind, self._note_weight) for kind in (Step, MicroBatch)]
        _loops().add(self)

    def _note_weight(self) -> None:
        self._has_weight = True

    def _note_update(self, optimizer: Optimizer) -> None:
        number = self._numbers.get(id(optimizer), self._numbers.get(_first(optimizer)))
        # Of two around each other, the inner one steps first.
        if number is None or self._steppers.setdefault(number, id(optimizer)) != id(optimizer):
            return
        self.updates[number] += 1
        if not self._has_update:
            self._has_update = True
            self._is_in_eval_mode = self._model is not None and not self._model.training
            each = (one for group in optimizer.param_groups for one in group["params"])
            learnt = [(one.numel(), one, one.grad) for one in each if one.grad is not None]
            if learnt:
                _, weight, gradient = min(learnt, key=itemgetter(0))
                self._kept = _Kept(weight, gradient, number)
        elif self._kept is not None and self._kept.number == number:
            self._kept.forget()

    def begin(self, step: Step, read: Callable[[], list[float]] | None) -> None:
        """Note what was set for a step, and watch its weights."""
        self.updates, self._values = [0] * len(self.updates), []
        if self._num_steps >= _MOST_STEPS:
            return
        self._values = [] if read is None or self._is_set_elsewhere else read()
        if not self._has_weight and any(one.weight not in (0, 1) for one in step.micro_batches):
            self._needs_weight = True
            of_step, of_micro_batch = self._kinds
            for one in step.micro_batches:
                one.__class__ = of_micro_batch
            step.__class__ = of_step

    def check_values(self, read: Callable[[], list[float]] | None) -> None:
        """Warn if values are not as the run has set them; called after a step, and before one."""
        if read is not None and self._values and self._values != read():
            self._values, self._is_set_elsewhere = [], True
            _warn(
                "something else has set a scheduled value, such as the learning rate, which the "
                "run sets for each step; leave the other scheduler out, or take 'lr' out of "
                "schedules"
            )

    def finish(self, read: Callable[[], list[float]] | None, *, is_done: bool) -> None:
        """Look after a step."""
        if self._num_steps >= _MOST_STEPS:
            return
        self._num_steps += 1
        self.check_values(read)
        if self._is_in_eval_mode:
            self._is_in_eval_mode = False
            _warn("the model is in eval mode; call model.train() before the loop")
        if self._needs_weight and not self._has_weight:
            self._has_weight = True
            _warn(
                "the weights of micro-batches were not read, so the gradient is not that of the "
                "batch; write (loss * micro.weight).backward()"
            )
        if self._kept is not None and self._kept.is_over and self._kept.is_so:
            self._kept = None
            _warn("gradients were not cleared; call optimizer.zero_grad() after optimizer.step()")
        if min(self.updates) > 1:
            self._num_steps = _MOST_STEPS
            _warn("optimizer.step() was called more than once in a step; call it before finish()")
        elif (is_done or self._num_steps == _MOST_STEPS) and not self._has_update:
            _warn(
                f"optimizer.step() was not called in {self._num_steps} steps; call it before "
                "finish()"
            )


@final
class _Kept:
    """Sees whether each pass between two updates adds to the gradient that the first has used.

    All else that writes to it, such as clearing in place, raises its version, too.
    """

    def __init__(self, weight: Tensor, gradient: Tensor, number: int) -> None:
        self.number = number
        """That of the optimizer."""
        self.is_so = self.is_over = False
        self._gradient, self._version = gradient, gradient._version
        # Not `register_hook`, which `torch.autograd.grad` calls, too.
        self._handle = weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, weight: Tensor) -> None:
        self._version += 1
        self.is_so = weight.grad is self._gradient and self._gradient._version == self._version

    def forget(self) -> None:
        """Look no longer."""
        self.is_over = True
        self._handle.remove()


def _first(optimizer: Optimizer) -> int:
    """Return the identity of the first weight."""
    return id(next(iter(optimizer.param_groups[0]["params"]), optimizer))


def _noting(kind: Any, note: Callable[[], None]) -> type[Any]:
    """Return `kind` with a note when a factor of the loss, or what it may be made of, is read."""

    class Noting(kind):  # type: ignore[misc]  # mypy has no types made at run time
        __slots__ = ()
        __qualname__ = kind.__qualname__

        def __getattribute__(self, name: str) -> Any:
            if name in ("weight", "num_samples"):
                note()
            return super().__getattribute__(name)

        def __reduce_ex__(self, protocol: Any) -> Any:
            note()  # a copy may be read
            self.__class__ = kind
            return self.__reduce_ex__(protocol)

    return Noting


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
