"""The training loop: steps, and what is due between them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, final

from stretto.batching import NO_SIGNALS, Signals
from stretto.batching.following import measured_value
from stretto.data import Step
from stretto.distributed.logged import mean_loss
from stretto.run import Run
from stretto.runtime.ranks import Ranks, all_same, marks
from stretto.runtime.step import Info
from stretto.timing import Timestamp
from stretto.training.callback import Events
from stretto.training.checkpointing.saver import Progress, Saver
from stretto.training.describe import check_agreement, in_batch
from stretto.training.evaluation.evaluate import Best, Evaluator
from stretto.training.evaluation.weights import TrainingWeights
from stretto.training.logs.recorder import MOST_PENDING, Finished, Recorder
from stretto.training.stepping.finite import Gradient, not_finite, skipped_alone
from stretto.training.stepping.stepper import Measured, Stepper

SIGNALS = ("SIGTERM", "SIGINT")
"""Those that end a run; where ranks have received several, the first of these counts."""


@final
class Interrupts:
    """While open, the first SIGINT or SIGTERM is remembered; the second one is as always.

    >>> with Interrupts() as interrupts:
    ...     interrupts.received is None
    True
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
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


class StepSums(NamedTuple):
    """What ranks exchange about a step: the sums over all of them."""

    tokens: float
    units: float
    """The units that the loss is a mean over, if gradients are divided by them later."""
    stops: float
    """Ranks that want to stop."""
    seconds: float
    """The seconds since the step before, from the first rank."""
    failed: float
    """Ranks whose loss or gradient is not finite."""
    skipped: float
    """Ranks that have skipped the step before."""
    mark: float
    mark_squared: float
    """These two show whether values that should be equal are (see `marks`)."""


class Shared(NamedTuple):
    """What all ranks know about a step."""

    tokens: int | None
    seconds: float | None
    is_finite: bool
    """Whether losses and gradients are finite on all of them."""
    saving: Progress = Progress()
    signals: Signals = NO_SIGNALS


_FINITE, _NOT_FINITE = (Shared(None, None, is_finite) for is_finite in (True, False))
"""The two cases of a step of one process that measures nothing."""


@final
@dataclass(slots=True, kw_only=True)
class Loop:
    """Trains until the run ends or is stopped."""

    run: Run
    stepper: Stepper
    recorder: Recorder
    saver: Saver
    evaluators: Sequence[Evaluator]
    best: Best
    weights: TrainingWeights
    metric: str | None
    """The metric that the batch size follows."""
    non_finite: Literal["stop", "skip", "ignore"]
    events: Events
    ranks: Ranks
    interrupts: Interrupts = field(default_factory=Interrupts)
    signal: str | None = None
    """The signal that any rank has received; None: none."""
    _all_stop: bool = False
    _is_saving: bool = False
    """Whether a checkpoint is being written."""
    _is_alone: bool = False
    """Whether there is one process and nothing is measured, so nothing is exchanged."""
    _shows: bool = False
    """Whether a callback sees the gradient."""
    _listens: bool = False
    """Whether a callback listens to single batches."""
    _wants_norm: bool = True
    """Whether the next update measures the norm of the gradient: once for each line of metrics."""
    _has_callbacks: bool = False
    """Whether a callback of some rank may stop several ranks between batches."""
    _has_skipped: bool = False
    """Whether the last step has left the weights as they were."""

    def train(self) -> None:
        """Train from the present clock."""
        self._begin()
        run, several = self.run, self.ranks.world_size > 1
        timer, hyperparameters = run.timer, run.hyperparameters
        timer.start()
        before = timer.timestamp
        while run.stop_reason is None or (several and not self._all_stop):
            step = run.begin()
            if step is None:
                break
            gradient, info, shared = self._compute(step)
            due = run.finish(shared.signals, tokens=shared.tokens, seconds=shared.seconds)
            after = timer.timestamp
            self.recorder.pending.append(
                Finished(
                    step.timestamp,
                    step.num_samples,
                    step.batch_size,
                    () if info is None else gradient.losses,
                    after,
                    gradient.num_micro_batches,
                    hyperparameters.row(),
                )
            )
            if shared.signals.noise_numerator is not None:
                self.events.tell("on_noise", step, shared.signals)
            if self._is_saving or self.recorder.console is not None:
                self._show_and_save(after, shared.saving)
            if self._listens:
                self.events.tell("on_batch_end", step)
            if due or after.epoch != before.epoch or len(self.recorder.pending) >= MOST_PENDING:
                self._after_batch(due, before, after)
                if self._has_callbacks:
                    self._agree_to_stop()
                before = after
        self._end(before)

    def _begin(self) -> None:
        self._all_stop, self.signal = False, None
        self._is_saving = self.saver.is_busy
        self._listens = any(map(self.events.listeners, _BATCH_EVENTS))
        self._shows = bool(self.events.listeners("on_gradient"))
        several = self.ranks.world_size > 1
        self._is_alone = not (several or self.stepper.measures)
        own = (
            self.run.stop_reason is not None,
            bool(self.run.callbacks),
            "grad_norm" in self.run.logged,
        )
        stops, callbacks, has_norm = self.ranks.agree(own)
        self._wants_norm = not has_norm
        self.stepper.retry.on_fall_back = self._note_fall_back
        self._has_callbacks = callbacks > 0
        if stops:
            self._stop_together()

    @property
    def _is_stopped(self) -> bool:
        # No rank may leave the loop alone, so only what all agreed on counts.
        return self._all_stop if self.ranks.world_size > 1 else self.run.stop_reason is not None

    def _agree_to_stop(self) -> None:
        """Stop after this batch if a callback of any rank has asked for it."""
        if self.ranks.world_size == 1 or self._all_stop:
            return
        if self.ranks.agree((self.run.stop_reason is not None,))[0]:
            self._stop_together()

    def _stop_together(self) -> None:
        """Stop on all ranks; every rank must call it."""
        self._all_stop = True
        self.signal = self._received()
        each = self.ranks.gather(self.run.ended)
        self.run.ended = next((reason for reason in each if reason is not None), None)
        why = self.run.ended or "another rank has stopped"
        why = why if self.signal is None else f"received {self.signal} on another rank"
        self.run.stop(why, is_final=False)

    def _received(self) -> str | None:
        """Return the signal that any rank has received; every rank must call it."""
        counts = self.ranks.agree([self.interrupts.received == name for name in SIGNALS])
        return next((name for name, ranks in zip(SIGNALS, counts, strict=True) if ranks), None)

    def _compute(self, step: Step) -> tuple[Gradient, Info | None, Shared]:
        """Compute one step; return its losses, what it logs (None: skipped), what ranks know."""
        run = self.run
        if self._listens:
            self.events.tell("on_batch_start", step)
        gradient = self.stepper.gradient(step)
        run.latest_loss = partial(mean_loss, gradient.losses)
        if self.interrupts.received is not None:
            run.stop(f"received {self.interrupts.received}", is_final=False)
        shared = _FINITE
        if self._is_saving or not self._is_alone or gradient.tokens is not None:
            shared = self._agree(step, gradient)
        elif not self.stepper.is_finite(gradient):
            shared = _NOT_FINITE
        info: Info | None = None
        if shared.is_finite:
            if self._shows:
                self.stepper.show(partial(self.events.tell, "on_gradient", step))
            info = self.stepper.update(measures_norm=self._wants_norm)
        self._has_skipped = info is None
        if info is None:
            self._skip(step, is_finite=shared.is_finite)
        else:
            run.skipped.in_a_row = 0
            self._wants_norm = False
            for name, value in info.items():
                run.log(name, value)
        return gradient, info, shared

    def _show_and_save(self, now: Timestamp, saving: Progress) -> None:
        """Show the progress of the run and write more of an unfinished checkpoint."""
        self.recorder.show_progress(now)
        if self._is_saving:
            self._announce(self.saver.advance(saving))
            self._is_saving = self.saver.is_busy

    def _skip(self, step: Step, *, is_finite: bool) -> None:
        """Count a step that did not change the weights, or end the run."""
        if not is_finite and self.non_finite == "stop":
            raise not_finite(step.timestamp, is_late=self.stepper.is_checked_late)
        self.stepper.clear()
        why = "the update left the weights as they were, as an overflow of the loss scale does"
        why = why if is_finite else "a loss or gradient was not finite"
        self.recorder.event("skipped_step", step.timestamp, f"skipped step: {why}")
        self.run.skipped.add(step.timestamp)

    def _note_fall_back(self, at: Timestamp, before: int, now: int) -> None:
        text = f"out of memory with micro-batches of {before:,}; repeated with {now:,}"
        self.recorder.event("out_of_memory", at, text, before=before, now=now)

    def _agree(self, step: Step, gradient: Gradient) -> Shared:
        """Exchange what ranks know about the step, in one all-reduce."""
        saving, measured = self.saver.progress(), self.stepper.measured(gradient)
        is_finite = self.stepper.is_finite(gradient)
        if self.ranks.world_size == 1:
            signals = measured.signals(step.num_samples)
            return Shared(gradient.tokens, None, is_finite, saving, signals)
        values = self.run.loader.extent | self.run.hyperparameters.values()
        own_tokens = step.num_tokens if gradient.tokens is None else gradient.tokens
        tokens, units = self.ranks.counted((own_tokens, gradient.units))
        own = StepSums(
            tokens,
            units,
            self.run.stop_reason is not None,
            self.run.timer.seconds_since_update() if self.ranks.is_first else 0.0,
            not is_finite,
            self._has_skipped,
            *marks(hash(tuple(values.values()))),
        )
        flags = self.stepper.flags(gradient)
        sums = self.ranks.agree((*own, *saving, *measured, *flags))
        start, end = len(own), len(own) + len(saving)
        last = end + len(measured)
        total, saving = StepSums(*sums[:start]), Progress(*sums[start:end])
        self._check_skipped(total.skipped)
        if not all_same((total.mark, total.mark_squared), self.ranks.world_size):
            check_agreement(in_batch(step.timestamp.batch + 1, values), self.ranks, call="fit()")
        self.stepper.finish(step, total.units, sums[last:])
        if total.stops:
            self._stop_together()
        signals = Measured(*sums[end:last]).signals(step.num_samples)
        return Shared(int(total.tokens), total.seconds, not total.failed, saving, signals)

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

    def _after_batch(self, due: frozenset[str], before: Timestamp, after: Timestamp) -> None:
        """Do everything that is due now."""
        self._settle()
        if len(self.recorder.pending) >= MOST_PENDING:
            self.recorder.record()
        self._end_epochs(before, after)
        if "log" in due:
            self._log()
        is_best = self._measure([one for one in self.evaluators if one.name in due])
        # The last checkpoint comes after the last line of metrics (see `_end`).
        if (is_best or "checkpoint" in due) and not self.run.horizon.is_done(after):
            self._save()
        if "flush" in due:
            self.recorder.flush()

    def _end_epochs(self, before: Timestamp, after: Timestamp) -> None:
        for _ in range(after.epoch - before.epoch):
            self.events.tell("on_epoch_end")

    def _end(self, before: Timestamp) -> None:
        """Log, evaluate and save after the last batch."""
        if not self._is_stopped:
            # It came too late for the ranks to agree on.
            self.run.stop_reason = self.run.ended = None
        self._settle()
        self._end_epochs(before, self.run.timer.timestamp)
        is_cut = self._is_stopped and not self.run.is_done
        if is_cut:
            self._save()  # before the last line: a resumed run writes it
        if self.recorder.is_waiting:
            self._log()
        if not self._is_stopped:
            self._measure(
                [one for one in self.evaluators if one.measured_at != self.run.timer.batch]
            )
        if not is_cut:
            self._save()
        self._announce(self.recorder.paused(self.saver.wait))
        self.signal = self._received()  # one that came too late to stop the run counts, too

    def _log(self) -> None:
        record = self.recorder.log(
            self.run.timer.timestamp,
            self.run.loader.log_values(),
            micro_batch_size=self.stepper.retry.largest_piece(self.run.step),
        )
        self._wants_norm = True
        self.run.logged_units = self.recorder.units
        self.events.tell("on_log", record)

    def look(self, evaluator: Evaluator) -> dict[str, float]:
        """Run one evaluation and log its metrics; nothing follows from them."""
        start = time.monotonic()
        with self.weights.evaluating(), self.events.evaluating():
            metrics = self.recorder.paused(evaluator.measure)
        seconds = round(time.monotonic() - start, 3)
        named = {f"{evaluator.name}/{name}": value for name, value in metrics.items()}
        self.recorder.write({**self.run.clock(), **named})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.recorder.event(
            "evaluation",
            self.run.timer.timestamp,
            f"evaluation {evaluator.name}: {shown}",
            name=evaluator.name,
            seconds=seconds,
        )
        return named

    def _measure(self, evaluators: Sequence[Evaluator]) -> bool:
        """Run evaluations; return whether the model is the best so far.

        Its checkpoint is written after all of them, so that it contains all results.
        """
        is_best = False
        for evaluator in evaluators:
            self.events.tell("on_evaluation_start", evaluator.name)
            named = self.look(evaluator)
            evaluator.measured_at = self.run.timer.batch
            self.events.tell("on_evaluation_end", evaluator.name, named)
            followed = measured_value(self.metric, named)
            if followed is not None:
                self.run.loader.note_metric(followed)
            is_best |= self.best.is_beaten(named, self.run.timer.sample)
        return is_best

    def _save(self) -> None:
        now = self.run.timer.timestamp
        if self.saver.needs(now.sample):
            self._announce(self.recorder.paused(self.saver.wait))
            self.events.tell("on_checkpoint_start")
            if self._has_callbacks:
                self._agree_to_stop()  # a checkpoint says whether the run has ended
            self.recorder.paused(lambda: self.saver.begin(now))
        elif self.saver.saved_at == now.sample:
            self.best.confirm(now.sample)
        self._is_saving = self.saver.is_busy

    def _announce(self, path: Path | None) -> None:
        if path is not None:
            self.events.tell("on_checkpoint", path)
