"""Callbacks and their events."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, Self, final

from stretto.batching import Signals
from stretto.data import Step
from stretto.errors import TrainingError, nearest
from stretto.run import Run
from stretto.schedules import Schedule, Scope
from stretto.schedules.fields import stretched
from stretto.schedules.schedule import linear
from stretto.timing import Horizon, Time, TimeLike, Timestamp, Trigger, parse_trigger
from stretto.timing.time import Number


class Callback:
    """Base class of callbacks; events that you do not override cost nothing.

    Each event gets the `Run`: its clock is `run.timer`, and `run.log("name", value)` puts a value
    on the next line of metrics. State that must survive a resume is saved by `state_dict` and
    `load_state_dict`: numbers, strings, bytes, tensors, and lists, tuples and dicts of them.

    >>> class PrintEpochs(Callback):
    ...     def on_epoch_end(self, run):
    ...         print(run.timer.get("ep"))
    """

    changes_tokens: bool = False
    """Whether `transform_batch` changes the number of tokens. Then tokens are counted after it, and
    token counts that the data declare are not used."""

    monitor: str | None = None
    """The metric that it follows, such as `"validation/loss"`; some evaluation must measure it."""

    every: TimeLike | Trigger | None = None
    """When `on_due` is called, in any unit, the same on all ranks; None: never. It is read when the
    trainer is built."""

    def __init_subclass__(cls, **named: Any) -> None:
        """Warn of methods that look like events and are none: nothing would call them."""
        super().__init_subclass__(**named)
        for name in vars(cls):
            is_new = not any(hasattr(base, name) for base in cls.__bases__)
            near = nearest(name, EVENTS) if name.startswith(("on_", "transform_")) else None
            if is_new and near is not None:
                said = (
                    f"{cls.__name__}.{name} is no event and is never called; did you mean {near!r}?"
                )
                warnings.warn(said, UserWarning, stacklevel=2)

    @property
    def scheduled_values(self) -> Mapping[str, Schedule]:
        """Schedules of values of its own, by name, as `Trainer(values=...)` takes them."""
        return {}

    def on_due(self, run: Run) -> None:
        """Called after each batch in which a time of `every` lies, when the clock has advanced.

        The plan shows these times. A line of metrics, an evaluation and a checkpoint that are due
        after the same batch come later, in this order.
        """

    def on_build(self, run: Run) -> None:
        """Called once when model, optimizers and clock are built, before a resume.

        It runs before `load_state_dict` and before a search for the micro-batch size, so the search
        takes memory that you allocate here into account.
        """

    def on_fit_start(self, run: Run) -> None:
        """Called when training starts; the clock is at the start or the resumed position.

        If it fails, it must undo its own changes, because its `on_fit_end` is not called.
        """

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Called before a step: the batch is loaded and hyper-parameters are set."""

    def transform_batch(self, run: Run, batch: Any) -> Any:  # noqa: ARG002
        """Return the micro-batch to train on instead of `batch`, which is on the device."""
        return batch

    def on_gradient(self, run: Run, step: Step) -> None:
        """Called when the parameters have the gradient of the whole batch, before clipping.

        With fp16 the gradient is unscaled already. It may be infinite; then the optimizer skips the
        step.
        """

    def on_noise(self, run: Run, step: Step, signals: Signals) -> None:
        """Called after a step whose gradient noise was measured.

        Noise is measured only if a callback overrides this, or if the batch size depends on it.
        """

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Called after the optimizer step, when the clock has advanced."""

    def on_epoch_end(self, run: Run) -> None:
        """Called after each epoch, several times if one batch ends several epochs."""

    def evaluating(self, run: Run) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context in which the model is evaluated, by `run.evaluate()`, too.

        Here a callback gives the model other weights. A `@contextmanager` with `try` and `finally`
        takes them back even if a metric fails.
        """
        return nullcontext()

    def on_evaluation_start(self, run: Run, name: str) -> None:
        """Called before an evaluation that is due; not by `run.evaluate()`.

        If the evaluation fails, `on_evaluation_end` is not called: see `evaluating`.
        """

    def on_evaluation_end(self, run: Run, name: str, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation that was due; not by `run.evaluate()`."""

    def on_log(self, run: Run, record: Mapping[str, float]) -> None:
        """Called after a line of metrics; `run.log` here adds to the next line."""

    def on_checkpoint_start(self, run: Run) -> None:
        """Called before `state_dict` is read for a checkpoint, while training waits."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called when a checkpoint is complete."""

    def on_fit_end(self, run: Run) -> None:
        """Called when training ends, stops or fails; undo what `on_fit_start` did.

        It is called if `on_fit_start` succeeded, even if other callbacks failed.
        """

    def scaled(self, ratio: Number) -> Self:
        """Return the callback for a run `ratio` times as long (`scale_schedule`).

        It is a copy with `every` and each attribute that is a `Time`, a trigger or a schedule
        scaled, or the callback itself if there are none. Override it if you store times in another
        way.

        >>> from stretto.training.algorithms import LayerFreezing
        >>> LayerFreezing(["embed"], start="2ep", end="80%").scaled(0.5)
        LayerFreezing(['embed'], start='1ep', end='0.8dur', level=1.0)
        """
        times = {
            name: value.scaled(ratio) if isinstance(value, Trigger) else stretched(value, ratio)
            for name, value in vars(self).items()
            if isinstance(value, (Time, Trigger, Schedule))
        }
        if self.every is not None and overrides(self, "on_due"):
            times["every"] = parse_trigger(self.every).scaled(ratio)
        if not times:
            return self
        other = copy.copy(self)
        vars(other).update(times)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a resume.

        It may contain None, bools, numbers, strings, bytes, tensors on any device, and lists,
        tuples and dicts of them. It is called once when the trainer is built, so that a state that
        cannot be saved is refused before the run.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; tensors are on the CPU.

        A `DTensor` is sharded like the tensor of the same key in the present state.
        """


@final
class Events:
    """The callbacks of a run that override each event."""

    __slots__ = ("_callbacks", "_listeners", "_run")

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._callbacks = tuple(callbacks)
        self._run = run
        self._listeners: dict[str, list[Callable[..., Any]]] = {
            name: [getattr(callback, name) for callback in callbacks if overrides(callback, name)]
            for name in EVENTS
        }

    def listeners(self, event: str) -> list[Callable[..., Any]]:
        """Return the listeners of `event`, in the order of the callbacks."""
        return self._listeners[event]

    def tell(self, event: str, *details: Any) -> None:
        """Call every listener of `event` with the run and the details."""
        for listener in self._listeners[event]:
            listener(self._run, *details)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Enter the contexts in which the callbacks have the model evaluated."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                if overrides(callback, "evaluating"):
                    stack.enter_context(callback.evaluating(self._run))
            yield

    @contextmanager
    def fit(self) -> Iterator[None]:
        """Call `on_fit_start` of all callbacks; at the end, `on_fit_end` of those that started.

        Raises:
            Exception: the first error; later errors are added as notes.
            TrainingError: `on_fit_end` failed on another rank.
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
        have_failed = self._run.ranks.agree((bool(failures),))[0]
        if failures:
            _, first = failures.pop(0)
            _add_notes(first, failures)
            raise first
        if have_failed:
            why = "on_fit_end of a callback failed on another rank"
            raise TrainingError.cannot("end the run", why=why, instead="see the error there")

    def _end(self, started: Iterable[Callback]) -> list[tuple[str, Exception]]:
        """Call `on_fit_end` of the callbacks; return names and errors of those that fail."""
        failures = []
        for callback in started:
            try:
                callback.on_fit_end(self._run)
            except Exception as error:  # noqa: BLE001  the others are called anyway
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


def unique(names: Iterable[str]) -> list[str]:
    """Return names, each different: a second `a` is `a_2`, or the next that is free.

    >>> unique(["a", "b", "a", "a_2"])
    ['a', 'b', 'a_3', 'a_2']
    """
    given = list(names)
    found: list[str] = []
    for name in given:
        free = (f"{name}_{number}" for number in count(2))
        taken = {*found, *given}
        found.append(next(one for one in free if one not in taken) if name in found else name)
    return found


def passed_between(horizon: Horizon, start: Time, end: Time) -> Callable[[Timestamp], float]:
    """Return how much of the run from `start` to `end` has passed, in [0, 1].

    >>> passed = passed_between(Horizon("10ba"), Time("2ba"), Time("60%"))
    >>> [passed(Timestamp(batch=batch)) for batch in (0, 2, 4, 6, 9)]
    [0.0, 0.0, 0.5, 1.0, 1.0]

    Raises:
        TrainingError: the stretch has no length.
        ConversionError: a time needs a fact that is not known.
    """
    run = Scope.of(horizon)
    first, last = run.after(start), run.after(end)
    own = run.part(first, last, last.axis)  # the stretch is counted in the unit of its end
    if last.tick <= own.start:
        raise TrainingError.bad("end", str(end), f"it is not after {start}", "write a later one")
    return linear(own, last.tick, 0.0, 1.0)
