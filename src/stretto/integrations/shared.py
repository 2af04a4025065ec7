"""Parts that several adapters use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from stretto.data import Step
from stretto.errors import DataError
from stretto.run import Run
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


def counted_steps(run: Run) -> Iterator[Step]:
    """Yield the steps of an epoch to a framework that counts them and does not ask for more.

    If the last samples of an epoch are dropped, the run finds its end when it is asked for the
    next step. So the first pass over the next epoch may find only that end.
    """
    is_empty = True
    for step in run.steps():
        is_empty = False
        yield step
    if is_empty and run.is_open:
        yield from run.steps()


@final
class StreamBatches:
    """Collated batches of a stream of samples; it has the state of the stream, if there is one."""

    def __init__(self, dataset: Any, size: int, collate: Any) -> None:
        self.dataset, self._size, self._collate = dataset, size, collate

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict", "set_epoch"):
            return getattr(self.dataset, name)
        raise AttributeError(name)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while chunk := list(islice(samples, self._size)):
            yield self._collate(chunk)


def is_shuffled(dataloader: Any) -> bool:
    """Return whether a dataloader over map-style data has a random order.

    Raises:
        DataError: it has another order than a random or a sequential one.
    """
    inner = dataloader.batch_sampler
    while hasattr(inner, "batch_sampler"):  # that of one rank, in accelerate
        inner = inner.batch_sampler
    sampler = getattr(inner, "sampler", None)
    is_plain = isinstance(inner, BatchSampler) and type(inner).__iter__ is BatchSampler.__iter__
    if is_plain and isinstance(sampler, SequentialSampler):
        return False
    if is_plain and isinstance(sampler, RandomSampler) and not sampler.replacement:
        return True
    raise DataError.cannot(
        f"follow the order of a {type(sampler if is_plain else inner).__name__}",
        why="a batch size that changes needs an order of single samples",
        instead="use a random or a sequential sampler",
    )
