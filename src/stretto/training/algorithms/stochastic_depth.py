"""Stochastic depth: residual blocks are left out by chance while training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from stretto.data import Step
from stretto.errors import TrainingError, shown
from stretto.run import Run
from stretto.runtime.compiled import plain_naming
from stretto.timing import Horizon, Time, TimeLike, Timestamp
from stretto.training.callback import Callback


def find_modules(model: nn.Module, names: Sequence[str], what: str) -> list[nn.Module]:
    """Return the modules of `model` that have these names; `what` says what for.

    >>> find_modules(nn.Sequential(nn.Identity()), ["0"], "freeze")
    [Identity()]

    Raises:
        TrainingError: the model has no module of a name.
    """
    modules, plain = dict(model.named_modules()), plain_naming(model)
    for name, module in tuple(modules.items()):
        modules.setdefault(plain(name), module)
    for name in names:
        if name not in modules:
            raise TrainingError.cannot(
                f"{what} {name!r}",
                why="the model has no such module",
                instead=f"write one of {shown(list(modules)[1:])}",
            )
    return [modules[name] for name in names]


def progress(horizon: Horizon, start: Time, end: Time) -> Callable[[Timestamp], float]:
    """Return how much of the run from `start` to `end` has passed, in [0, 1].

    >>> passed = progress(Horizon("10ba"), Time("2ba"), Time("60%"))
    >>> [passed(Timestamp(batch=batch)) for batch in (0, 2, 4, 6, 9)]
    [0.0, 0.0, 0.5, 1.0, 1.0]

    Raises:
        TrainingError: the stretch has no length.
        ConversionError: a time needs a fact that is not known.
    """
    # From the start of the run on, the stretch is counted in the unit of its end.
    start = start if start else end * 0
    axis = horizon.common_axis((start, end))
    horizon.check_moves(axis)
    first, last = horizon.ticks(start, axis), horizon.ticks(end, axis)
    if last <= first:
        raise TrainingError.bad("end", str(end), f"it is not after {start}", "write a later one")

    def passed(timestamp: Timestamp) -> float:
        return min(1.0, max(0.0, float((axis.read(timestamp) - first) / (last - first))))

    return passed


@final
class StochasticDepth(Callback):
    """Leaves out whole residual blocks, the deeper the more often.

    Block l of L is left out of a training pass with probability `rate * l / L`, and its residual
    branch is divided by the probability that it is there, so evaluation needs no change (Huang et
    al. 2016, arXiv 1603.09382, section 3, with the division moved to training). The rate grows
    from 0 over `warmup`.

    >>> StochasticDepth(["blocks.0", "blocks.1"], rate=0.2, warmup="5%")
    StochasticDepth(['blocks.0', 'blocks.1'], rate=0.2, warmup='0.05dur')

    Args:
        blocks: names of modules whose output has the shape of their input, first block first.
        rate: how often the deepest one is left out.
        warmup: how long the rate grows; None: it is there from the start.

    Raises:
        TrainingError: no blocks, or a rate that is not in (0, 1).
    """

    def __init__(
        self, blocks: Sequence[str], *, rate: float = 0.2, warmup: TimeLike | None = None
    ) -> None:
        if not blocks or not 0 < rate < 1:
            raise TrainingError.cannot(
                f"leave out the blocks {list(blocks)} at a rate of {rate}",
                why="there are no blocks, or the rate is not in (0, 1)",
                instead="write StochasticDepth(['blocks.0'], rate=0.2)",
            )
        self._blocks = tuple(blocks)
        self._rate = rate
        self._warmup = None if warmup is None else Time(warmup)
        self._now = rate
        self._restore: list[Callable[[], None]] = []

    def on_fit_start(self, run: Run) -> None:
        """Put chance in front of each block."""
        blocks = find_modules(run.model, self._blocks, "leave out")
        self._grown = (
            progress(run.horizon, self._warmup * 0, self._warmup) if self._warmup else None
        )
        for depth, block in enumerate(blocks, start=1):
            self._restore.append(self._lottery(block, depth / len(blocks)))

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Set the rate of this batch."""
        del run
        self._now = self._rate * (self._grown(step.timestamp) if self._grown else 1.0)

    def on_fit_end(self, run: Run) -> None:
        """Give every block its own forward pass back."""
        del run
        while self._restore:
            self._restore.pop()()

    def _lottery(self, module: nn.Module, depth: float) -> Callable[[], None]:
        own, forward = vars(module).get("forward"), module.forward

        def sometimes(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            rate = self._now * depth
            if not module.training or rate == 0:
                return forward(hidden, *args, **kwargs)
            if torch.rand(()) < rate:
                # Keeps its parameters in the graph, as averaging over ranks expects.
                return hidden + 0 * sum(parameter.sum() for parameter in module.parameters())
            return hidden + (forward(hidden, *args, **kwargs) - hidden) / (1 - rate)

        module.forward = sometimes

        def restore() -> None:
            if own is None:
                del module.forward  # its class has one
            else:
                module.forward = own

        return restore

    def __repr__(self) -> str:
        shown = f", warmup='{self._warmup}'" if self._warmup else ""
        return f"StochasticDepth({list(self._blocks)}, rate={self._rate}{shown})"
