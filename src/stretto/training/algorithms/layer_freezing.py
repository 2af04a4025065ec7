"""Layer freezing: the first layers stop learning one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from torch import nn

from stretto.data import Step
from stretto.errors import TrainingError
from stretto.run import Run
from stretto.timing import Time, TimeLike
from stretto.training.algorithms.stochastic_depth import find_modules, progress
from stretto.training.callback import Callback


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
        self._progress = progress(run.horizon, self._start, self._end)
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
