"""The training loop: steps, and what is due between them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Literal, final

from stretto.data import Step
from stretto.distributed.logged import mean_loss
from stretto.run import Run
from stretto.runtime.agreement import check_agreement, in_batch
from stretto.runtime.ranks import Ranks, all_same, marks
from stretto.runtime.step import Info
from stretto.timing import Timestamp
from stretto.training.callback import Events
from stretto.training.checkpointing.saver import Saver
from stretto.training.evaluate import Evaluations
from stretto.training.logs.recorder import MOST_PENDING, Recorder
from stretto.training.stepper import LOSS_OF, Stepper, StepResult, not_finite, skipped_alone

SIGNALS = ("SIGTERM", "SIGINT")
"""Those that end a run; where ranks have received several, the first of these counts."""


@final
class Stops:
    """Whether the run stops, as all ranks agree.

    While open, the first SIGINT or SIGTERM is remembered; the second one is as always.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._ranks = run, run.ranks
        self.received: str | None = None
        """The signal that this rank has received."""
        self.signal: str | None = None
        """The signal that any rank has received."""
        self.has_callbacks = False
        """Whether a callback of some rank may stop the run between batches."""
        self.is_agreed = False
        """Whether all ranks have agreed to stop."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stops:
        self.received = None
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def is_stopped(self) -> bool:
        """Whether training stops before its end; no rank may leave the loop alone."""
        several = self._ranks.world_size > 1
        return self.is_agreed if several else self._run.stop_reason is not None

    def agree(self) -> None:
        """Stop after this batch if a callback of any rank has asked for it."""
        if self._ranks.world_size == 1 or self.is_agreed or not self.has_callbacks:
            return
        if self._ranks.agree((self._run.stop_reason is not None,))[0]:
            self.stop_together()

    def stop_together(self) -> None:
        """Stop on all ranks; every rank must call it."""
        run, self.is_agreed = self._run, True
        self.signal = self.received_anywhere()
        each = self._ranks.gather(run.ended)
        run.ended = next((reason for reason in each if reason is not None), None)
        why = run.ended or "another rank has stopped"
        why = why if self.signal is None else f"received {self.signal} on another rank"
        run.stop(why, is_final=False)

    def received_anywhere(self) -> str | None:
        """Return the signal that any rank has received; every rank must call it."""
        counts = self._ranks.agree([self.received == name for name in SIGNALS])
        return next((name for name, ranks in zip(SIGNALS, counts, strict=True) if ranks), None)


def raise_for(received: str | None) -> None:
    """Raise what Python raises when a signal ends a program, if one was received.

    >>> raise_for(None)

    Raises:
        KeyboardInterrupt: it was SIGINT.
        SystemExit: it was SIGTERM; its code is 143.
    """
    if received == "SIGINT":
        raise KeyboardInterrupt
    if received is not None:
        raise SystemExit(exit_code(received))


def exit_code(reason: str) -> int:
    """Return what a shell expects of a run that stopped so: 0 where no signal has ended it.

    >>> exit_code("received SIGTERM"), exit_code("the loss is low enough")
    (143, 0)
    """
    return next((128 + n for n in (signal.SIGINT, signal.SIGTERM) if n.name in reason), 0)


_BATCH_EVENTS = ("on_batch_start", "transform_batch", "on_gradient", "on_noise", "on_batch_end")


@final
@dataclass(slots=True, kw_only=True)
class Loop:
    """Trains until the run ends or is stopped."""

    run: Run
    stepper: Stepper
    recorder: Recorder
    evaluations: Evaluations
    saver: Saver
    due: Mapping[str, Callable[[], object]]
    """What is called after a batch at which its name is due, in this order."""
    stops: Stops
    non_finite: Literal["stop", "skip", "ignore"]
    events: Events
    ranks: Ranks
    _is_alone: bool = False
    """Whether there is one process and nothing is measured, so nothing is exchanged."""
    _shows: bool = False
    """Whether a callback sees the gradient."""
    _listens: bool = False
    """Whether a callback listens to single batches."""
    _wants_norm: bool = True
    """Whether the next update measures the norm of the gradient: once for each line of metrics."""
    _has_skipped: bool = False
    """Whether the last step has left the weights as they were."""

    def train(self) -> None:
        """Train from the present clock."""
        self._begin()
        run, several, stops = self.run, self.ranks.world_size > 1, self.stops
        timer, hyperparameters = run.timer, run.hyperparameters
        timer.start()
        before = timer.timestamp
        while run.stop_reason is None or (several and not stops.is_agreed):
            step = run.begin()
            if step is None:
                break
            result = self._compute(step)
            due = run.finish(result.signals, tokens=result.tokens, seconds=result.seconds)
            result.after = after = timer.timestamp
            result.values = row = hyperparameters.row()
            row += step.values.values()
            self.recorder.pending.append(result)
            if result.signals.noise_numerator is not None:
                self.events.tell("on_noise", step, result.signals)
            if self.saver.job is not None or self.recorder.console is not None:
                self.recorder.show_progress(after)
                self.saver.advance(result.saving)
            if self._listens:
                self.events.tell("on_batch_end", step)
            if due or after.epoch != before.epoch or len(self.recorder.pending) >= MOST_PENDING:
                self._after_batch(before, after)
                before = after
        self._end(before)

    def _begin(self) -> None:
        stops = self.stops
        stops.is_agreed, stops.signal = False, None
        self._listens = any(map(self.events.listeners, _BATCH_EVENTS))
        self._shows = bool(self.events.listeners("on_gradient"))
        several = self.ranks.world_size > 1
        self._is_alone = not (several or self.stepper.measures)
        own = (
            self.run.stop_reason is not None,
            bool(self.run.callbacks),
            "grad_norm" in self.run.logged,
        )
        are_stopped, callbacks, has_norm = self.ranks.agree(own)
        self._wants_norm = not has_norm
        self.stepper.retry.on_fall_back = self._note_fall_back
        self.stepper.check_weights()
        stops.has_callbacks = callbacks > 0
        if are_stopped:
            stops.stop_together()

    def _compute(self, step: Step) -> StepResult:
        """Compute one step and update the weights, unless the step is skipped."""
        run, stepper = self.run, self.stepper
        if self._listens:
            self.events.tell("on_batch_start", step)
        result = stepper.gradient(step)
        run.latest_loss = partial(mean_loss, result.losses)
        if self.stops.received is not None:
            run.stop(f"received {self.stops.received}", is_final=False)
        if not self._is_alone or self.saver.job is not None or result.tokens is not None:
            self._agree(step, result)
        elif stepper.check is not None:
            result.is_finite = stepper.check.passes(list(map(LOSS_OF, result.losses)))
        info: Info | None = None
        if result.is_finite:
            if self._shows:
                stepper.show(partial(self.events.tell, "on_gradient", step))
            info = stepper.update(measures_norm=self._wants_norm)
        self._has_skipped = info is None
        if info is None:
            result.losses = []
            self._skip(step, is_finite=result.is_finite)
        else:
            run.skipped.in_a_row = 0
            self._wants_norm = False
            for name, value in info.items():
                run.log(name, value)
        return result

    def _skip(self, step: Step, *, is_finite: bool) -> None:
        """Count a step that did not change the weights, or end the run."""
        if not is_finite and self.non_finite == "stop":
            raise not_finite(step.timestamp, is_late=self.stepper.is_checked_late)
        self.stepper.clear()
        why = "the update left the weights as they were, as an overflow of the loss scale does"
        why = why if is_finite else "a loss or gradient was not finite"
        self.recorder.files.event("skipped_step", step.timestamp, f"skipped step: {why}")
        self.run.skipped.add(step.timestamp)

    def _note_fall_back(self, at: Timestamp, before: int, now: int) -> None:
        text = f"out of memory with micro-batches of {before:,}; repeated with {now:,}"
        self.recorder.files.event("out_of_memory", at, text, before=before, now=now)

    def _agree(self, step: Step, result: StepResult) -> None:
        """Exchange what ranks know about the step, in one all-reduce."""
        run, ranks, stepper = self.run, self.ranks, self.stepper
        saving, measured = self.saver.progress(), stepper.measured(result)
        result.is_finite = stepper.is_finite(result)
        if ranks.world_size == 1:
            result.saving = saving
            result.signals = stepper.signals(measured, step.num_samples)
            return
        values = run.loader.extent | run.hyperparameters.values() | dict(step.values)
        own_tokens = step.num_tokens if result.tokens is None else result.tokens
        own = (
            *ranks.counted((own_tokens, result.units)),
            run.stop_reason is not None,
            run.timer.seconds_since_update() if ranks.is_first else 0.0,
            not result.is_finite,
            self._has_skipped,
            *marks(hash(tuple(values.values()))),
            *saving,
        )
        sums = ranks.agree((*own, *measured, *stepper.flags(result)))
        end = len(own) + len(measured)
        tokens, units, stops, seconds, bad, skipped, mark, square, *result.saving = sums[: len(own)]
        self._check_skipped(skipped)
        if not all_same((mark, square), ranks.world_size):
            check_agreement(in_batch(step.timestamp.batch + 1, values), ranks, call="fit()")
        stepper.finish(step, units, sums[end:])
        if stops:
            self.stops.stop_together()
        result.tokens, result.seconds, result.is_finite = int(tokens), seconds, not bad
        result.signals = stepper.signals(sums[len(own) : end], step.num_samples)

    def _settle(self) -> None:
        """Check, before anything is made of the weights, what is known of the steps only now."""
        is_known = self.ranks.world_size == 1 or not self.stepper.may_skip
        if is_known and not self.stepper.is_checked_late:
            return
        bad, skipped = self.ranks.agree((not self.stepper.settle(), self._has_skipped))
        if bad:
            raise not_finite(self.run.timer.timestamp, is_late=True)
        self._check_skipped(skipped)

    def _check_skipped(self, count: float) -> None:
        """Refuse to continue if only some ranks have skipped the last step."""
        if count in (0, self.ranks.world_size):
            return
        flags = enumerate(self.ranks.gather(str(self._has_skipped)))
        skipping = [rank for rank, flag in flags if flag == "True"]
        raise skipped_alone(self.run.timer.timestamp, skipping)

    def _after_batch(self, before: Timestamp, after: Timestamp) -> None:
        """Do everything that is due now."""
        self._settle()
        self.stepper.check_weights()
        if len(self.recorder.pending) >= MOST_PENDING:
            self.recorder.record()
        self._end_epochs(before, after)
        for name, work in self.due.items():
            if name in self.run.due:  # an evaluation may add the checkpoint
                work()
        self._wants_norm |= "log" in self.run.due
        self.stops.agree()

    def _end_epochs(self, before: Timestamp, after: Timestamp) -> None:
        for _ in range(after.epoch - before.epoch):
            self.events.tell("on_epoch_end")

    def _end(self, before: Timestamp) -> None:
        """Log, evaluate and save after the last batch."""
        is_stopped, run = self.stops.is_stopped, self.run
        if not is_stopped:
            # It came too late for the ranks to agree on.
            run.stop_reason = run.ended = None
        self._settle()
        self._end_epochs(before, run.timer.timestamp)
        is_cut = is_stopped and not run.is_done
        if is_cut:
            self.saver.save()  # before the last line: a resumed run writes it
        if self.recorder.is_waiting:
            self.recorder.log()
        if not is_stopped:
            self.evaluations.measure_rest()
        if not is_cut:
            self.saver.save()
        self.recorder.paused(self.saver.wait)
        # One that came too late to stop the run counts, too.
        self.stops.signal = self.stops.received_anywhere()
