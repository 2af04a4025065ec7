"""`ClockScheduler`: a learning rate scheduler for frameworks that insist on one."""

from __future__ import annotations

from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stretto.timing import Timer


@final
class ClockScheduler(LRScheduler):
    """Reports the learning rates that a run sets; its `step` changes nothing.

    Frameworks call `step` once for each step, micro-batch, rank or
    epoch, each in its own way; the run sets the values for the time and size of each step.

    Args:
        optimizer: whose learning rates it reports.
        timer: the clock of the run.
    """

    def __init__(self, optimizer: Optimizer, timer: Timer) -> None:
        # Do not call super().__init__: it writes learning rates and wraps optimizer.step.
        self.optimizer = optimizer
        self._timer = timer
        self.base_lrs = [
            float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups
        ]

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The number of finished steps, as torch names it."""
        return self._timer.batch

    @property
    def _last_lr(self) -> list[float]:  # type: ignore[override]
        return self.get_last_lr()

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """Return the present learning rates."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_lr = get_last_lr  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state of the run has it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""
