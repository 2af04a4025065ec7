"""Events: what one can listen to in a run, without a word in the loop for whoever does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from stretto.batching import Signals
from stretto.batching.policy import stretched
from stretto.data import Step
from stretto.schedules import Schedule
from stretto.timing import Time, Trigger
from stretto.timing.time import Number
from stretto.training.run import Run


class Callback:
    """Listens to a run; override what you need, the rest costs nothing.

    Each event gets the `Run`: its clock is `run.timer`, and `run.log("name", value)` puts a value
    on the next line of metrics. State that must survive a resume goes through `state_dict` and
    `load_state_dict`: numbers, texts, bytes, tensors, and lists, tuples and dicts of them.

    >>> class PrintEpochs(Callback):
    ...     def on_epoch_end(self, run):
    ...         print(run.timer.get("ep"))
    """

    changes_tokens: bool = False
    """Whether `transform_batch` changes how many tokens a batch has: then they are counted behind
    it, and what the data state of an epoch or a sample is not relied upon."""
    sets_learning_rate: bool = False
    """Whether it changes learning rates with the batch size, as a learning rate rule does."""

    result_file: tuple[str, str] | None = None
    """What it leaves in the run folder: a few words for the user, and the name of the file."""

    def on_build(self, run: Run) -> None:
        """Model, optimizers and clock are built; nothing is resumed yet.

        It comes once, before `load_state_dict`, and before a search for the micro-batch size, which
        then leaves room for what is allocated here.
        """

    def on_fit_start(self, run: Run) -> None:
        """Training begins; the clock stands where the run starts or resumes.

        Where this fails, it must undo what it has done so far: it is not told the end.
        """

    def on_batch_start(self, run: Run, step: Step) -> None:
        """The batch is there and hyper-parameters are set; nothing is computed yet."""

    def transform_batch(self, run: Run, batch: Any) -> Any:  # noqa: ARG002
        """Return the micro-batch to train on instead of `batch`, on its device."""
        return batch

    def on_gradient(self, run: Run, step: Step) -> None:
        """The gradient of the whole batch is in the parameters, not yet clipped.

        With fp16, it is divided by the loss scale already; it may be infinite, and then the
        optimizer does not step.
        """

    def on_noise(self, run: Run, step: Step, signals: Signals) -> None:
        """The noise of the step's gradient was measured, and the clock has moved.

        It is measured only where this is overridden, or where the batch size follows it.
        """

    def on_batch_end(self, run: Run, step: Step) -> None:
        """The optimizer has stepped and the clock has moved."""

    def on_epoch_end(self, run: Run) -> None:
        """An epoch has ended; once for each, also where one batch ended several."""

    def on_evaluation_start(self, run: Run, name: str) -> None:
        """An evaluation begins; if it fails, `on_evaluation_end` does not come."""

    def on_evaluation_end(self, run: Run, name: str, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def on_log(self, run: Run, record: Mapping[str, float]) -> None:
        """A line of metrics was logged; what `run.log` takes now is for the next one."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint is whole and in its place."""

    def on_fit_end(self, run: Run) -> None:
        """Training has ended, was stopped, or has failed: undo what `on_fit_start` did.

        It comes where `on_fit_start` has, also if that of a later callback or this of an earlier
        one failed.
        """

    def scaled(self, ratio: Number) -> Self:
        """Return the callback for a run `ratio` times as long (`scale_schedule`).

        It is a copy in which every attribute that is a `Time`, a trigger or a schedule is
        stretched; without any, it is the callback itself. Override it for times kept otherwise.

        >>> from stretto.training.algorithms import LayerFreezing
        >>> LayerFreezing(["embed"], start="2ep", end="80%").scaled(0.5)
        LayerFreezing(['embed'], start='1ep', end='0.8dur', level=1.0)
        """
        times = {
            name: value.scaled(ratio)
            if isinstance(value, (Trigger, Schedule))
            else stretched(value, ratio)
            for name, value in vars(self).items()
            if isinstance(value, (Time, Trigger, Schedule))
        }
        if not times:
            return self
        other = copy.copy(self)
        vars(other).update(times)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a resume.

        None, bools, numbers, texts, bytes, tensors on any device, and lists, tuples and dicts of
        them. It is called once when the trainer is built, so that a state that no checkpoint can
        hold is refused before the run.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, its tensors on the CPU.

        A tensor that is spread over ranks (a `DTensor`) comes back spread like the one of the same
        key in the present state.
        """


@final
class Events:
    """The listeners of each event of a run: only those that do listen."""

    __slots__ = ("_callbacks", "_listeners", "_run")

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._callbacks = tuple(callbacks)
        self._run = run
        self._listeners: dict[str, list[Callable[..., Any]]] = {
            name: [getattr(callback, name) for callback in callbacks if overrides(callback, name)]
            for name in EVENTS
        }

    def listeners(self, event: str) -> list[Callable[..., Any]]:
        """Return whoever listens to `event`, in the order of the callbacks."""
        return self._listeners[event]

    def tell(self, event: str, *details: Any) -> None:
        """Call every listener of `event` with the run and the details."""
        for listener in self._listeners[event]:
            listener(self._run, *details)

    @contextmanager
    def fit(self) -> Iterator[None]:
        """Tell all the start; at the end, however it comes, tell those that know of the start.

        Raises:
            Exception: the first that is raised; what fails after it becomes its notes.
        """
        started: list[Callback] = []
        try:
            for callback in self._callbacks:
                callback.on_fit_start(self._run)
                started.append(callback)
            yield
        except BaseException as error:
            _add_notes(error, self._end(started))
            raise
        failures = self._end(started)
        if failures:
            _, first = failures.pop(0)
            _add_notes(first, failures)
            raise first

    def _end(self, started: Iterable[Callback]) -> list[tuple[str, Exception]]:
        """Tell the end; return who failed at that, and how."""
        failures = []
        for callback in started:
            try:
                callback.on_fit_end(self._run)
            except Exception as error:  # noqa: BLE001  the others are told nevertheless
                failures.append((type(callback).__qualname__, error))
        return failures


def _add_notes(error: BaseException, failures: Iterable[tuple[str, Exception]]) -> None:
    for name, failure in failures:
        error.add_note(f"and {name}.on_fit_end failed: {type(failure).__name__}: {failure}")


EVENTS = tuple(name for name in vars(Callback) if name.startswith(("on_", "transform_")))
"""The names of all events."""


def overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback does anything at the event `name`."""
    return getattr(type(callback), name) is not getattr(Callback, name)
