"""Layer freezing, and stochastic depth: parts of a model do not train, or not always."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from stretto.data import Step
from stretto.errors import TrainingError, shown
from stretto.run import Run
from stretto.runtime.compiled import plain_naming
from stretto.timing import Time, TimeLike
from stretto.training.callback import Callback, passed_between


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
            passed_between(run.horizon, self._warmup * 0, self._warmup) if self._warmup else None
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


@final
class LayerFreezing(Callback):
    """Freezes layers from the first to the last, evenly over a part of the run.

    At progress x through `start` to `end`, the first `floor(x * level * L)` of L layers are frozen
    (FreezeOut, Brock et al. 2017, arXiv 1706.04983, section 3, with a linear schedule). It is a
    function of the time alone, so nothing needs saving. The gradient of a frozen layer is dropped
    before the optimizer sees it, which is right on several ranks too, where all of a model's
    gradients must take part in the averaging; on one rank it is not even computed, unless all
    that the optimizer has is frozen.

    >>> LayerFreezing(["embed", "blocks.0"], start="50%")
    LayerFreezing(['embed', 'blocks.0'], start='0.5dur', end='1dur', level=1.0)

    Args:
        layers: names of modules as in `model.named_modules()`, first to freeze first.
        start: when the first layer may freeze.
        end: when `level` is reached.
        level: the part of the layers that is frozen in the end.

    Raises:
        TrainingError: no layers, or a level that is not in (0, 1].
    """

    def __init__(
        self,
        layers: Sequence[str],
        *,
        start: TimeLike = "50%",
        end: TimeLike = "100%",
        level: float = 1.0,
    ) -> None:
        if not layers or not 0 < level <= 1:
            raise TrainingError.cannot(
                f"freeze {level} of the layers {list(layers)}",
                why="there must be layers, and a part of them in (0, 1]",
                instead="write LayerFreezing(['embed', 'blocks.0'], level=1.0)",
            )
        self._layers = tuple(layers)
        self._start, self._end, self._level = Time(start), Time(end), level
        self.num_frozen = 0
        self._stopped: list[nn.Parameter] = []

    def on_fit_start(self, run: Run) -> None:
        """Find the layers and resolve the times."""
        self._modules = find_modules(run.model, self._layers, "freeze")
        self._progress = passed_between(run.horizon, self._start, self._end)
        self._alone = run.world_size == 1

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Freeze the layers that are due."""
        passed = self._progress(step.timestamp)
        # A hair of tolerance: 0.3 * 10 is 2.9999999999999996.
        due = math.floor(passed * self._level * len(self._modules) + 1e-9)
        for module in self._modules[self.num_frozen : due]:
            if self._alone and _learns_without(run.model, module):
                self._stopped += [p for p in module.parameters() if p.requires_grad]
                module.requires_grad_(requires_grad=False)
        self.num_frozen = max(due, self.num_frozen)

    def on_gradient(self, run: Run, step: Step) -> None:
        """Drop the gradients of frozen layers."""
        del run, step
        for module in self._modules[: self.num_frozen]:
            for parameter in module.parameters():
                parameter.grad = None

    def on_fit_end(self, run: Run) -> None:
        """Unfreeze all layers frozen here."""
        del run
        for parameter in self._stopped:
            parameter.requires_grad = True
        self._stopped.clear()
        self.num_frozen = 0

    def __repr__(self) -> str:
        return (
            f"LayerFreezing({list(self._layers)}, start='{self._start}', end='{self._end}', "
            f"level={self._level})"
        )


def _learns_without(model: nn.Module, module: nn.Module) -> bool:
    """Whether anything is left for a backward pass to reach."""
    own = {id(parameter) for parameter in module.parameters()}
    return any(p.requires_grad and id(p) not in own for p in model.parameters())
