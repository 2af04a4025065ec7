"""`Run`: the interface of a run for callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.data import Step
from stretto.errors import TrainingError
from stretto.optim import Hyperparameters
from stretto.planning import Plan
from stretto.runtime.packing import PackingError, pack, unpack
from stretto.settings import one_of
from stretto.timing import Horizon, Timer
from stretto.training.distributed.ranks import Ranks
from stretto.training.logs.logged import Logged, Reduce
from stretto.training.stepping.finite import SkippedSteps

_T = TypeVar("_T", float, Tensor)


@final
class Run:
    """A run as its callbacks see it: model, clock, current step, other ranks, metrics.

    A `Trainer` has one and hands it to every event. A loop of your own can make one, for callbacks
    that were written for the trainer.

    >>> import torch
    >>> from stretto import StepLoader
    >>> from torch.utils.data import TensorDataset
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = StepLoader(TensorDataset(torch.randn(64, 4)), 16, max_duration="1ep")
    >>> run = Run(model, [optimizer], loader.timer, loader.horizon)
    >>> for step in loader:
    ...     run.begin_step(step)
    ...     loss = sum(micro.weight * model(micro.batch[0]).square().mean() for micro in step)
    ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
    ...     run.set_loss(loss)
    ...     run.log("size", step.num_samples, reduce="sum")
    >>> run.take_logged()
    {'size': 64.0}

    Args:
        model: the model itself, neither compiled nor wrapped.
        optimizers: those that update it.
        timer: the clock.
        horizon: the static facts of the run: its length, and the size of an epoch.
        hyperparameters: the scheduled hyper-parameters, for callbacks that read them.
        plan: the plan of the run; None: unknown.
        folder: the run folder; None: there is none.
        callbacks: the callbacks of the run.
        ranks: the processes of the run; None: those of the environment.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        timer: Timer,
        horizon: Horizon,
        *,
        hyperparameters: Hyperparameters | None = None,
        plan: Plan | None = None,
        folder: Path | None = None,
        callbacks: Sequence[object] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.timer = timer
        self.horizon = horizon
        self._hyperparameters = hyperparameters
        self.plan = plan
        self.folder = folder
        self.callbacks = tuple(callbacks)
        self.step: Step | None = None
        """The current step, from `on_batch_start` until the next step; None before the first."""
        self.stop_reason: str | None = None
        """Why the run stops after this batch, or has stopped; None: it continues."""
        self.logged_units = 0.0
        """Number of samples, or target tokens, of the loss in the last line of metrics."""
        self.skipped = SkippedSteps()
        """Counts skipped steps; for the loop."""
        self.logged = Logged()
        """Values logged since the last line of metrics; for the loop."""
        self._ranks = Ranks.from_environment() if ranks is None else ranks
        self.latest_loss: float | Tensor | Callable[[], float] = float("nan")
        """What `loss` reads; for the loop."""
        self._evaluate: Callable[[], dict[str, float]] | None = None

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The base values, the schedules and the learning rate rule.

        Raises:
            TrainingError: the loop has not set them.
        """
        if self._hyperparameters is None:
            raise TrainingError.cannot(
                "read the schedules of the run",
                why="the loop has not set them",
                instead="pass Run(hyperparameters=Hyperparameters(optimizer, {}, horizon))",
            )
        return self._hyperparameters

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self._ranks.world_size

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self._ranks.is_first

    @property
    def loss(self) -> float:
        """The mean loss of the current step on this rank; nan before it is computed.

        It is known from `on_gradient` on. Reading it waits for the device, so read it only when
        you need it; `log` takes tensors without waiting.
        """
        loss = self.latest_loss
        if not isinstance(loss, float):
            loss = self.latest_loss = float(loss() if callable(loss) else loss)
        return loss

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a value was not finite."""
        return self.skipped.count

    def log(
        self, name: str, value: float | Tensor, *, reduce: Reduce = "mean", weight: float = 1.0
    ) -> None:
        """Put a value on the next line of metrics.

        It is reduced over all calls since the last line and over all ranks; not every rank has to
        log. Logged values survive a resume.

        Args:
            name: the name on the line. Names that the line already has are refused.
            value: a number, or a tensor with one element, which is read when the line is written.
            reduce: `"mean"`; `"sum"`; or `"last"`: the newest value, of the first rank that has
                one.
            weight: the weight in a mean. For example, `step.local_num_samples` gives a mean over
                samples for any batch sizes.

        Raises:
            TrainingError: the value is not a number, or the name was logged with another reduction
                since the last line.
        """
        self.logged.add(name, value, reduce=reduce, weight=weight)

    def take_logged(self) -> dict[str, float]:
        """Return values logged since the last call; for your own loop.

        Every rank must call it.
        """
        return self.logged.take(self._ranks)

    def all_reduce(self, value: _T, reduce: Literal["sum", "mean", "max", "min"] = "sum") -> _T:
        """Return a number, or a tensor element by element, reduced over all ranks.

        Every rank must call it, with a tensor of the same shape and type on its device.

        Raises:
            TrainingError: there is no such reduction, or another rank has ended.
        """
        one_of("reduce", reduce, ("sum", "mean", "max", "min"))
        operation = "sum" if reduce == "mean" else reduce
        divisor = self.world_size if reduce == "mean" else 1
        if isinstance(value, Tensor):
            total = value.detach().clone()
            self._ranks.reduce(total, operation)
            return total / divisor if divisor > 1 else total
        packed = torch.tensor([value], dtype=torch.float64)
        self._ranks.reduce(packed, operation)
        return float(packed.item()) / divisor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on every rank.

        Every rank must call it. Nothing is pickled: values may contain the types that
        `Callback.state_dict` allows.

        Raises:
            TrainingError: a value has another type, or another rank has ended.
        """
        texts = self._ranks.gather(_text(value, "gather"), call="run.gather()")
        return [unpack(json.loads(text)) for text in texts]

    def broadcast(self, value: Any = None) -> Any:
        """Return the first rank's value on every rank. Every rank must call it.

        Raises:
            TrainingError: the value has a type that `gather` refuses, or another rank has ended.
        """
        text = _text(value if self.is_first_rank else None, "broadcast")
        return unpack(json.loads(self._ranks.gather(text, call="run.broadcast()")[0]))

    def barrier(self) -> None:
        """Wait until every rank has called it.

        Raises:
            TrainingError: another rank has ended, or the time limit has passed.
        """
        self._ranks.gather("", call="run.barrier()")

    def stop(self, reason: str) -> None:
        """Stop the run after the current batch, as a signal would.

        In `on_fit_start`, it stops before the first batch. The first reason counts. On several
        ranks, one call is enough.
        """
        self.stop_reason = self.stop_reason or reason

    def evaluate(self) -> dict[str, float]:
        """Run all evaluations, log the metrics and return them by `name/metric`.

        Every rank must call it.

        Raises:
            TrainingError: the loop has no evaluations.
        """
        if self._evaluate is None:
            raise TrainingError.cannot(
                "evaluate",
                why="the loop has no evaluations",
                instead="call run.evaluate_with(function) in the loop first",
            )
        return self._evaluate()

    def evaluate_with(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Set the function that `evaluate` calls; for the loop."""
        self._evaluate = evaluate

    def begin_step(self, step: Step) -> None:
        """Set the current step; for the loop."""
        self.step, self.latest_loss = step, float("nan")

    def set_loss(self, loss: float | Tensor | Callable[[], float]) -> None:
        """Set the loss of the step, or a function that reads it; for the loop."""
        # Avoid `isinstance(loss, Tensor)`, which is slow because torch overrides it.
        self.latest_loss = loss if callable(loss) or isinstance(loss, float) else loss.detach()


def _text(value: Any, verb: str) -> str:
    try:
        return json.dumps(pack(value))
    except PackingError as error:
        raise TrainingError.cannot(
            f"{verb} a {type(value).__name__}",
            why=str(error),
            instead="pass numbers, texts, bytes, tensors, and lists, tuples and dicts of them",
        ) from None
