"""Exponential moving average of the weights, by which the model is evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor

from stretto.data import Step
from stretto.errors import TrainingError
from stretto.run import Run
from stretto.runtime.compiled import known_as, plain_naming
from stretto.runtime.sharded import check_shapes, is_dtensor
from stretto.timing import Time, TimeLike, Timestamp, Trigger, parse_trigger
from stretto.training.callback import Callback


@final
class ExponentialMovingAverage(Callback):
    """Averages the weights while they are trained; evaluations measure the averages.

    Each update is `average += (1 - d) * (weights - average)`. With a half-life of h it has
    `d = 2 ** (-t / h)`, where t is the time since the last update in the unit of h, as Karras et
    al. 2022 state it in images (arXiv 2206.00364). So a half-life in samples or tokens means the
    same at every batch size: it is the scaling rule of Busbridge et al. 2023 (arXiv 2307.13813,
    definition 1.2), by which a batch of k times the size has the decay `d ** k`. With `decay`, d is
    that number in each update, whatever the batch size is.

    Averages are kept in float32 (or in the type of the weights, if that is wider), spread over
    ranks as the weights are, saved in checkpoints and resumed to the last bit. Buffers, such as the
    statistics of batch normalisation, are those of the model. Checkpoints keep the trained weights
    in `model` and the averages in `callbacks`.

    >>> ExponentialMovingAverage(half_life="10_000sp", every="10ba", start="5%")
    ExponentialMovingAverage(half_life='10Ksp', every=Every('10ba'), start='0.05dur')

    Args:
        decay: d in each update, in [0, 1); or else state `half_life`.
        half_life: the time in which the weight of the past halves, in any unit.
        every: when the average is updated.
        start: when averaging begins, with the weights of that moment.
        replaces_weights: whether the model has the averages once the run has reached its end.

    Raises:
        TrainingError: neither or both of `decay` and `half_life` are given, or one cannot be.
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        half_life: TimeLike | None = None,
        every: TimeLike | Trigger = "1ba",
        start: TimeLike = "0ba",
        replaces_weights: bool = False,
    ) -> None:
        self._decay = decay
        self._half_life = None if half_life is None else Time(half_life)
        self._every, self._start = parse_trigger(every), Time(start)
        self._replaces_weights = replaces_weights
        is_time = self._half_life is not None and self._half_life.amount > 0
        is_decay = decay is not None and 0 <= decay < 1
        if (decay is None) == (half_life is None) or not (is_time or is_decay):
            raise TrainingError.cannot(
                f"average weights with decay={decay!r} and half_life={half_life!r}",
                why="one of the two must be given: a decay in [0, 1), or a time above 0",
                instead="write ExponentialMovingAverage(half_life='10_000sp')",
            )
        self._weights: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}
        self._updated: Timestamp | None = None
        self._saved: Mapping[str, Any] | None = None
        self._trained: list[Tensor] | None = None

    def on_build(self, run: Run) -> None:
        """Allocate the averages, and resolve the times."""
        check_shapes(run.model, "average the weights of")
        plain = plain_naming(run.model)
        self._weights = {
            plain(name): parameter
            for name, parameter in run.model.named_parameters()
            if parameter.is_floating_point() or parameter.is_complex()
        }
        self._averages = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._weights.items()
        }
        self._is_due = self._every.bind(run.horizon)
        self._start_axis = run.horizon.axis(self._start.unit)
        self._start_ticks = run.horizon.ticks(self._start, self._start_axis)
        if self._half_life is not None:
            self._axis = run.horizon.axis(self._half_life.unit)
            run.horizon.check_moves(self._axis)
            self._half_ticks = float(run.horizon.ticks(self._half_life, self._axis))
        if self._saved is not None:
            self.load_state_dict(self._saved)

    def on_fit_start(self, run: Run) -> None:
        """Begin, if averaging begins with the run."""
        self._restore()
        self._begin(run.timer.timestamp)

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Update the averages, if that is due."""
        now = run.timer.timestamp
        if self._updated is None:
            self._begin(now)
        elif self._is_due(step.timestamp, now):
            self._update(now)

    def evaluating(self, run: Run) -> AbstractContextManager[None]:
        """Have the averages evaluated."""
        del run
        return self.averaged()

    def on_fit_end(self, run: Run) -> None:
        """Put the trained weights back, or the averages in their place where that is wanted."""
        self._restore()
        is_over = run.horizon.is_done(run.timer.timestamp)
        if self._replaces_weights and is_over and self._updated is not None:
            self._copy_averages()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the averages within a `with` block, for example to export them.

        Before averaging has begun, the model keeps its weights.
        """
        if self._updated is None or self._trained is not None:  # there are none, or they are in
            yield
            return
        self._trained = [weight.clone() for _, weight in self._pairs()]
        try:
            self._copy_averages()
            yield
        finally:
            self._restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and when they were updated."""
        updated = None if self._updated is None else self._updated.to_state()
        return {"average": self._averages, "updated": updated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved averages."""
        if not self._averages:
            self._saved = state  # the model is not known yet
            return
        saved = {known_as(name, self._averages): one for name, one in state["average"].items()}
        if saved.keys() != self._averages.keys():
            raise ValueError("the averages are those of another model")
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(saved[name])
        updated = state["updated"]
        self._updated = None if updated is None else Timestamp.from_state(updated)

    def _begin(self, now: Timestamp) -> None:
        if self._updated is None and self._start_axis.read(now) >= self._start_ticks:
            self._updated = now
            for average, weight in self._pairs():
                average.copy_(weight)

    def _update(self, now: Timestamp) -> None:
        assert self._updated is not None, "averaging has begun"
        if self._decay is not None:
            weight = 1 - self._decay
        else:
            passed = self._axis.read(now) - self._axis.read(self._updated)
            weight = -math.expm1(-math.log(2) * passed / self._half_ticks)
        self._updated = now
        pairs = self._pairs()
        alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if alike:
            averages, weights = zip(*alike, strict=True)
            torch._foreach_lerp_(averages, weights, weight)  # no public spelling of it
        for average, own in pairs:  # one at a time: a copy of all in float32 may not fit
            if average.dtype != own.dtype:
                average.lerp_(own.to(average.dtype), weight)

    def _restore(self) -> None:
        if self._trained is not None:
            for (_, weight), trained in zip(self._pairs(), self._trained, strict=True):
                weight.copy_(trained)
            self._trained = None

    def _copy_averages(self) -> None:
        for average, weight in self._pairs():
            weight.copy_(average)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each average with its weight: the parts that this rank has, without their history."""
        return [
            (_own(self._averages[name]), _own(weight)) for name, weight in self._weights.items()
        ]

    def __repr__(self) -> str:
        first = f"{self._decay}" if self._half_life is None else f"half_life='{self._half_life}'"
        replaces = ", replaces_weights=True" if self._replaces_weights else ""
        return (
            f"ExponentialMovingAverage({first}, every={self._every!r}, start='{self._start}'"
            f"{replaces})"
        )


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor
