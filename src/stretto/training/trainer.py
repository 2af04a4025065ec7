"""`Trainer`: what a run is made of, and its start, resume and end."""

from __future__ import annotations

import math
import secrets
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from torch import nn
from torch.optim import Optimizer

from stretto._foreign import knows_foreign
from stretto._location import local_path
from stretto.batching import PolicyLike, RuleLike, awaits_maximum, with_maximum
from stretto.batching.metrics import COST, followed_metric, metrics_of
from stretto.batching.policy import has_tokens
from stretto.batching.rows import LengthsLike, as_lengths
from stretto.batching.seesaw import Pair
from stretto.batching.step_cost import StepCost
from stretto.checkpoint import checkpoint_path
from stretto.checkpoint.formats import load_dcp_weights
from stretto.data import DataSpec
from stretto.distributed.mesh import Mesh
from stretto.distributed.strategy import Strategy, strategy_on
from stretto.errors import CheckpointError, PlanError, StrettoError, TrainingError
from stretto.optim.hyperparameters import as_one_schedule, joined
from stretto.planning import Plan
from stretto.planning.bind import check_tokens
from stretto.run import Run, prepare
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.agreement import plain
from stretto.runtime.modes import train_mode
from stretto.runtime.ranks import Ranks
from stretto.schedules import ScheduleLike
from stretto.schedules.fields import one_of
from stretto.settings import (
    Checkpointing,
    Computing,
    Loading,
    Precision,
    Stepping,
    read_settings,
)
from stretto.timing import Time, TimeLike, Timer, Trigger, parse_trigger
from stretto.timing.time import Number
from stretto.training.callback import Callback, Events, overrides
from stretto.training.checkpointing.resuming import find_checkpoint, open_run
from stretto.training.checkpointing.saver import Saver
from stretto.training.checkpointing.state import (
    Functions,
    Part,
    callback_parts,
    check_states,
    check_texts,
    parts_of,
    share_random_state,
)
from stretto.training.criterion import Criterion, CriterionLoss, as_loss
from stretto.training.describe import Setup, compare_ranks, describe_run
from stretto.training.evaluate import Best, BestEvaluation, Evaluations, Evaluator, TrainingWeights
from stretto.training.fitting import FoundMaximum, find_maximum, find_micro_batch
from stretto.training.logs.loggers import ConsoleLogger, has_terminal
from stretto.training.logs.recorder import RESUMED_FILES, Recorder
from stretto.training.loop import Loop, Stops, raise_for
from stretto.training.metrics import check_merging
from stretto.training.pricing import check_rule, machine_of, measure_cost
from stretto.training.settings import (
    Evaluation,
    Logging,
    LossFunction,
    check_listeners,
    check_parts,
    check_ratio,
    given_sizes,
    named_callbacks,
    named_settings,
    read_evaluations,
    scale,
)
from stretto.training.stepper import Stepper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stretto.memory import Answer

MicroBatchSize: TypeAlias = int | str | None
"""None: the whole share of a rank; `"auto"`: what fits into memory."""


@final
class Trainer:
    """Trains a model with a batch size that may change, to the end of `max_duration`.

    Everything that could be wrong with the settings is found here, before the first step.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    >>> model = torch.nn.Linear(4, 1)
    >>> trainer = Trainer(
    ...     model, data,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    ...     max_duration="2ep",
    ...     batch_size="0ep:8 1ep:16",
    ... )
    >>> trainer.fit()
    >>> trainer.timer.batch, trainer.timer.sample
    (12, 128)

    Args:
        model: the model; moved to the device and, on several ranks, wrapped. Or a `TrainStep` of
            your own, without `optimizer` and `loss`. `fit` puts it into training mode, but for the
            parts that are in eval mode while the model as a whole is not.
        train_data: a data set, a `DataLoader`, an iterable of batches, or a `DataSpec`.
        optimizer: an optimizer of the model's parameters.
        loss: `loss(model, batch)`, the mean over the batch (see `Stepping.loss_reduction`); or a
            criterion `(output, target)` such as `nn.MSELoss()`, for batches `(inputs, targets)`.
        max_duration: how long to train, in any unit but `dur`.
        batch_size: samples of one optimizer step over all ranks: a number, a text such as
            `"0tok:768 250Btok:1536"`, a function, a policy, or a pair such as `Seesaw`, which also
            sets the schedule of the learning rate; `"auto"`: as many as fit into memory in one pass
            on each rank, found before the run and kept when it is resumed.
        micro_batch_size: the most samples of one forward pass on one rank, or the most tokens with
            padding, such as `"8Ktok"`; None: the whole share; `"auto"`: as many samples as fit into
            memory, found before the run. With each of them, a step that runs out of memory is
            repeated with smaller micro-batches.
        use_maximum_batch_size: torchtune's word for `batch_size="auto"`; if `batch_size` is given,
            for `micro_batch_size="auto"`.
        schedules: by hyper-parameter (`"lr"`, `"weight_decay"`, `"lr@group"`), a schedule or
            several that multiply.
        values: numbers of your own on the clock, such as the weight of a loss: by name, a schedule
            or several that multiply. `run.values` and `step.values` have them.
        rule: how learning rates follow the batch size: `{"sqrt": 256}`, `LinearRule(256)`, a
            function `size -> factor`; or values by name, `{"betas.1": HalfLifeRule(256)}`; None:
            not at all.
        precision: what autocast computes in: `"fp32"`, `"bf16"` or `"fp16"`.
        clip_norm: the largest norm of the whole step's gradient.
        compile: whether the model runs through `torch.compile`.
        device: where to compute; None: this rank's CUDA device if there is one, else the CPU.
        loading: how samples are ordered and fetched: a `Loading`, or a mapping of its fields.
        stepping: how a step is computed: a `Stepping`, or a mapping of its fields.
        evaluate: the data of an evaluation; or an `Evaluation`, or several with names of their own.
        checkpoint: when checkpoints are written, such as `"1ep"`, or a `Checkpointing`; needs
            `folder`.
        log: when metrics are logged, such as `"10ba"`, or a `Logging`.
        callbacks: listeners.
        strategy: how the model trains on several ranks; None: `Single`, `Ddp` or, if `fully_shard`
            was called on it, `FullyShard`.
        mesh: the mesh of all ranks if they share the model, too: its dimensions named `dp`,
            `dp_replicate`, `dp_shard`, `replicate`, `shard` or `fsdp` share out the samples; a
            `Mesh` names others.
        idle_ranks: whether a batch may have fewer samples than there are ranks; the others then run
            dummies of weight 0.
        sequence_length: tokens of a sequence, as in `prepare`: samples are joined to it.
        scale_schedule: makes the run this many times as long, with every time in the arguments
            above that is not a fraction of it. Callbacks that have times are copied
            (`trainer.callbacks`). The number of samples in the data stays.
        folder: where metrics, the ledger and checkpoints go; one for each run.
        clock: the wall clock, nanoseconds that only grow; by default, the system's.

    Raises:
        StrettoError: something in the settings cannot be; the message says what to write.
    """

    # What a run is, one parameter each, and the rest in groups; all but two by keyword.
    @knows_foreign
    def __init__(
        self,
        model: nn.Module | TrainStep,
        train_data: Any,
        *,
        optimizer: Optimizer | None = None,
        loss: LossFunction | Criterion | None = None,
        max_duration: TimeLike,
        batch_size: PolicyLike | Pair | None = None,
        micro_batch_size: MicroBatchSize = None,
        use_maximum_batch_size: bool = False,
        schedules: Mapping[str, ScheduleLike | Sequence[ScheduleLike]] | None = None,
        values: Mapping[str, ScheduleLike | Sequence[ScheduleLike]] | None = None,
        rule: RuleLike | None = None,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        compile: bool = False,  # noqa: A002  as torch calls it
        device: str | None = None,
        loading: Loading | Mapping[str, Any] = Loading(),
        stepping: Stepping | Mapping[str, Any] = Stepping(),
        evaluate: Any = None,
        checkpoint: Checkpointing | Mapping[str, Any] | TimeLike | Trigger | None = None,
        log: Logging | Mapping[str, Any] | TimeLike | Trigger = Logging(),
        callbacks: Sequence[Callback] = (),
        strategy: Strategy | None = None,
        mesh: DeviceMesh | Mesh | None = None,
        idle_ranks: bool = False,
        sequence_length: LengthsLike | None = None,
        scale_schedule: Number | None = None,
        folder: str | Path | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        loading = read_settings(Loading, loading, "loading")
        stepping = read_settings(Stepping, stepping, "stepping")
        computing = Computing(
            precision=precision, clip_norm=clip_norm, compile=compile, device=device
        )
        check_parts(model, optimizer, loss, computing, stepping)
        evaluations = read_evaluations(evaluate)
        check_listeners(model, evaluations, callbacks)
        called = as_loss(loss, stepping.loss_reduction) if callable(loss) else None
        if isinstance(called, CriterionLoss) and called.is_over_targets:
            stepping = stepping.counted(called.count)
        sizes, micro_batch_size = given_sizes(
            batch_size, micro_batch_size, train_data, uses_maximum=use_maximum_batch_size
        )
        if checkpoint is not None:
            checkpoint = read_settings(Checkpointing, checkpoint, "checkpoint")
            check_texts(callbacks)
        named = named_settings(evaluations, checkpoint, read_settings(Logging, log, "log"))
        if scale_schedule is not None:
            followed = [
                {name: as_one_schedule(one) for name, one in ({} if each is None else each).items()}
                for each in (schedules, values)
            ]
            lengths = None if sequence_length is None else as_lengths(sequence_length)
            times = Time(max_duration), sizes, *followed, named, callbacks, lengths
            stretched = scale(times, check_ratio(scale_schedule))
            max_duration, sizes, schedules, values, named, callbacks, sequence_length = stretched
        self.folder = None if folder is None else local_path(folder, "keep a run in", TrainingError)
        self.callbacks = tuple(callbacks)
        """The listeners, in the order in which they are called."""
        self.found_maximum: FoundMaximum | None = None
        """The batch size that was found for `"auto"`, and how; None if it was given."""
        self.fitting: Answer | None = None
        """How the micro-batch size was found; None if it was given."""
        self._is_training = self._is_resumed = False
        self.changes: tuple[str, ...] = ()
        """The settings that differ from those of the checkpoint that was resumed, a line each."""
        self._ranks = ranks = Ranks.from_environment(device, stepping.longest_wait)
        inner = model.model if isinstance(model, TrainStep) else model
        self._strategy = strategy_on(mesh, strategy, inner, ranks)
        self.step = placed_step(
            model,
            optimizer,
            called,
            computing=computing,
            loss_reduction=stepping.loss_reduction,
            strategy=self._strategy,
        )
        """Computes gradients and updates the weights."""
        self.model = self.step.model
        self._weights = TrainingWeights(self.model, self.step.optimizers)
        self.optimizer = joined(self.step.optimizers)
        """The optimizer; of several one that has the parameter groups of all, in order."""
        varies = any(one.changes_tokens for one in self.callbacks)
        brought = ChainMap(*(dict(one.scheduled_values) for one in self.callbacks))
        listening = named_callbacks(self.callbacks, named)
        finds_micro = micro_batch_size is None and awaits_maximum(sizes)
        due: dict[str, Any] = {**named, **listening}
        described = partial(
            describe_run,
            self.step,
            named,
            optimizer=self.optimizer,
            settings=(computing, stepping),
            ranks=ranks,
            max_duration=str(max_duration),
            micro_batch_size="auto" if finds_micro else plain(micro_batch_size),
            mesh=self._strategy.mesh,
        )
        self._setup = Setup(self.optimizer, described)
        prepared = partial(
            prepare,
            DataSpec.of(train_data, tokens_vary=True if varies else None),
            max_duration=max_duration,
            schedules=schedules,
            values={**(values or {}), **brought} if brought else values,
            rule=rule,
            every={name: one.every for name, one in due.items()},
            micro_batch_size=None if micro_batch_size == "auto" else micro_batch_size,
            loading=loading,
            model=self.model,
            callbacks=self.callbacks,
            folder=self.folder,
            idle_ranks=idle_ranks,
            sequence_length=sequence_length,
        )
        self.run = self._bound(prepared, sizes, clock)
        """What every event of a callback gets."""
        self._make_loop(named, listening, stepping, self._built_events(micro_batch_size))

    def _bound(self, prepared: Callable[..., Run], sizes: Any, clock: Callable[[], int]) -> Run:
        """Return the run, bound to its optimizers, with the largest size if that is to be found."""
        is_found = awaits_maximum(sizes)
        run = prepared(with_maximum(sizes, None) if is_found else sizes)
        if self._ranks.world_size > 1:
            self._setup.read(run)
            compare_ranks(self._setup.settings, self.step, self.callbacks, self._ranks)
        if is_found:
            self.found_maximum = find_maximum(self.step, run, self._ranks)
            largest, answer = self.found_maximum
            # Samples of unequal length, or fewer ranks after a resume, may need a second pass.
            cuts = has_tokens(largest) or run.micro_batch_size is None
            more = {"micro_batch_size": answer.size} if cuts else {}
            run = prepared(with_maximum(sizes, largest), **more)
        run.bind(self.step.optimizers, strategy=self._strategy).timer.clock = clock
        return run

    def _built_events(self, micro_batch_size: MicroBatchSize) -> Events:
        """Build the callbacks, and find the micro-batch size beside what they allocate."""
        events = Events(self.callbacks, self.run)
        events.tell("on_build")
        if self.callbacks or not isinstance(self.step, SupervisedStep):
            check_states({**callback_parts(self.callbacks), "step": self.step})
        transforms = events.listeners("transform_batch")
        self.step.transforms = [partial(call, self.run) for call in transforms]
        self.run.refused = self._refused()
        if micro_batch_size == "auto":
            self.fitting = find_micro_batch(self.step, self.run, self._ranks, self.plan)
            self.run.refused = self._refused()
        return events

    def _make_loop(
        self,
        named: Mapping[str, Any],
        listening: Mapping[str, Callback],
        stepping: Stepping,
        events: Events,
    ) -> None:
        """Build what trains the run, and what of it a checkpoint keeps."""
        run, step, ranks, log = self.run, self.step, self._ranks, named["log"]
        checkpoint = named.get("checkpoint")
        evaluations = [one for one in named.values() if isinstance(one, Evaluation)]
        if ranks.world_size > 1:
            for one in evaluations:
                check_merging(one.metrics)
        run.watch("flush", parse_trigger(log.flush).bind(run.horizon))
        stepper = Stepper(
            step,
            run.spec,
            settings=stepping,
            strategy=self._strategy,
            reads=run.loader.reads,
            measures_noise=bool(events.listeners("on_noise")),
            micro_batch_size=run.loader.micro_batch_size,
            is_found=self.fitting is not None,
        )
        stepper.further.clock = self.timer.clock
        is_shown = ranks.is_first and (has_terminal() if log.console is None else log.console)
        folder = None if self.folder is None else str(self.folder)
        given = self._setup.settings if log.config is None else dict(log.config)
        recorder = Recorder(
            run,
            log.loggers,
            events=events,
            largest_piece=stepper.retry.largest_piece,
            sample_seconds=stepper.further.take,
            console=ConsoleLogger(run.horizon.max_duration) if is_shown else None,
            config=ChainMap({"folder": folder}, given),
        )
        recorder.files.facts |= {
            "machine": machine_of(ranks),
            "optimizer": " and ".join(type(one).__name__ for one in step.optimizers),
            "micro_batch_size": plain(run.loader.micro_batch_size),
        }
        if self._weights.optimizers:
            names = [type(one).__name__ for one in self._weights.optimizers]
            recorder.files.facts["evaluates_with"] = " and ".join(
                f"{name}.eval()" for name in names
            )
        if self.found_maximum is not None:
            recorder.files.facts["found_batch_size"] = plain(self.found_maximum.size)
        if self.fitting is not None and self.fitting.peak is not None:
            recorder.files.facts["predicted_memory_bytes"] = self.fitting.peak
        measuring = Evaluations(
            run,
            [
                Evaluator(one, step, run, count=stepper.count, strategy=self._strategy)
                for one in evaluations
            ],
            best=Best(checkpoint, evaluations),
            metric=followed_metric(run.loader.reads, metrics_of(evaluations)),
            weights=self._weights,
            events=events,
            recorder=recorder,
        )
        parts = parts_of(
            step,
            run,
            weights=self._weights,
            retry=stepper.retry,
            recorder=recorder,
            callbacks=callback_parts(self.callbacks),
            evaluations=measuring,
            setup=self._setup,
            strategy=self._strategy,
        )
        self._price: dict[str, Any] = {}  # a / b of a step, and the machine it was measured on
        if COST in run.loader.reads:
            check_rule(run.prepared, step.optimizers)
            parts["step_cost"] = Functions(self._price.copy, self._price.update)
        stops = Stops(run)
        saver = Saver(
            checkpoint,
            run,
            parts=parts,
            model=step.model,
            strategy=self._strategy,
            recorder=recorder,
            best=measuring.best,
            events=events,
            agree_to_stop=stops.agree,
        )
        self._loop = Loop(
            run=run,
            stepper=stepper,
            recorder=recorder,
            evaluations=measuring,
            saver=saver,
            due={
                **{name: partial(one.on_due, run) for name, one in listening.items()},
                "log": recorder.log,
                **{one.name: partial(measuring.measure, one.name) for one in evaluations},
                "checkpoint": saver.save_due,
                "flush": recorder.flush,
            },
            stops=stops,
            non_finite=stepping.non_finite,
            events=events,
            ranks=ranks,
        )
        run.evaluate_with(self.evaluate)

    @property
    def plan(self) -> Plan | None:
        """The run as it is planned.

        None if its batches are not known before the run, for example because their sizes follow
        tokens that have to be counted: `run.why_not_planned` says why. `plan.is_exact` says whether
        it is only a bound.
        """
        return self.run.plan

    @property
    def timer(self) -> Timer:
        """The clock."""
        return self.run.timer

    def get_elapsed_duration(self) -> float:
        """Return the fraction of the run that has passed, in [0, 1], as its timer has it."""
        return self.timer.get_elapsed_duration()

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops, or has stopped, before its end; None: it continues or has ended.

        `"received SIGINT"` or `"received SIGTERM"` after a signal (with `" on another rank"` on the
        other ranks), else what was passed to `stop`.
        """
        return self.run.stop_reason

    @property
    def parts(self) -> dict[str, Part]:
        """What a checkpoint keeps, by name.

        Before `resume` or `fit`, add anything with `state_dict` and `load_state_dict`.
        """
        return self._loop.saver.parts

    @property
    def unsaved(self) -> str | None:
        """Why the last checkpoint, or its copy, could not be written; None where it could."""
        return self._loop.saver.unsaved

    @property
    def best(self) -> BestEvaluation | None:
        """The best evaluation so far, by `Checkpointing(monitor=...)`; None before the first."""
        best, folder = self._loop.evaluations.best, self._loop.saver.folder
        if best.monitor is None or best.sample is None or folder is None:
            return None
        return BestEvaluation(checkpoint_path(folder, best.sample), best.monitor, best.value)

    @knows_foreign
    def fit(
        self,
        *,
        resume: str | Path | None = None,
        even_if_stopped: bool = False,
        on_signal: Literal["raise", "return"] = "raise",
    ) -> None:
        """Train until `max_duration` is reached, or the run is stopped.

        SIGINT and SIGTERM end it after the batch, with a checkpoint where those are kept; all ranks
        end alike. A run that was stopped continues when you call this again. Resumed from a
        checkpoint, it continues if a signal, or `stop(is_final=False)`, has stopped it; one that
        early stopping or `stop` has ended trains no more, with a warning.

        Args:
            resume: what to continue from first, as `resume` takes it, such as `"auto"`.
            even_if_stopped: whether a resumed run continues although early stopping or `stop` has
                ended it.
            on_signal: what happens after a signal. `"raise"`: an exception ends the program, so
                that nothing after this call takes the model for a trained one; `"return"`: it
                returns, and `stop_reason` says why.

        Raises:
            KeyboardInterrupt: SIGINT was received, and the checkpoint is written.
            SystemExit: SIGTERM was; its code is 143.
            TrainingError: the folder holds another run, a live one writes to it, or it cannot be
                written to; or a loss or gradient is not finite (see `Stepping.non_finite`).
            PlanError: a stage that is still to come has fewer samples than there are ranks.
        """
        one_of(on_signal, "on_signal", ("raise", "return"), TrainingError)
        self._check_outside("train", "fit()")
        self._setup.read(self.run)
        if resume is not None:
            self.resume(resume)
        if self.run.refused is not None:
            raise self.run.refused
        loop = self._loop
        loop.saver.check_added()
        if even_if_stopped or not self._is_resumed:
            self.run.ended = None
        self._is_resumed = False
        self.run.stop_reason = self.run.ended
        self._warn_if_over()
        # The folder is let go of last, when nothing is written there any more.
        with ExitStack() as folder, ExitStack() as held:
            self._is_training = True
            folder.callback(self._leave)
            if self.run.loader.spec.is_map_style:  # what is iterated would have to begin anew
                held.callback(self.run.loader.close)
            held.push(loop.recorder.close)
            held.callback(loop.saver.close)
            self.run.take_back()
            open_run(
                folder,
                self.folder,
                loop.recorder,
                self.timer.timestamp,
                self._ranks,
                store=loop.saver.store,
                run_id=self._setup.run_id,
            )
            loop.saver.submit()
            held.enter_context(loop.stops)
            train_mode(self.model)
            loop.stepper.clear()  # a gradient from before is no part of the first batch
            share_random_state(self._strategy)
            self._weights.train()
            if COST in self.run.loader.reads:
                self._follow_cost()
            with loop.events.fit(), self._ranks.monitor.watch(inside_a_pass=True):
                loop.train()
                self._weights.eval()  # what is trained is used next
        if on_signal == "raise":
            raise_for(loop.stops.signal or loop.stops.received)

    def measure_cost(self, sizes: Sequence[int] | None = None) -> StepCost:
        """Return the seconds of a step by batch size, on all ranks; nothing else changes.

        Whole steps run in a sandbox, with what measures the noise, but without reading data.

        Args:
            sizes: up to five batch sizes; by default, some of those that the run may have.

        Raises:
            TrainingError: no sample can be read before the run, or sizes are in tokens.
        """
        stepper = self._loop.stepper
        return measure_cost(stepper, self.step, self.run, sizes, clock=self.timer.clock)

    def _follow_cost(self) -> None:
        """Give the policy the price of a step, measured unless this machine has done it before."""
        price, machine = self._price, machine_of(self._ranks)
        if price.get("machine") != machine:
            cost, before = self.measure_cost(), price.get("machine")
            ratio = cost.bounded_ratio()
            if ratio is None:
                instead = "write c= a number, or a wider range from 'minimum' to 'maximum'"
                raise TrainingError.cannot("follow c='time'", why=str(cost), instead=instead)
            price |= {"machine": machine, "ratio": ratio, "c": math.sqrt(ratio)}
            text = f"c = {cost.c:.4g} on {machine}: {cost}"
            text += f"; measured again, since the last was on {before}" if before else ""
            self._loop.recorder.files.event("step_cost", self.timer.timestamp, text, **price)
        self.run.loader.note_cost(price["ratio"])

    def _check_outside(self, what: str, call: str) -> None:
        """Refuse a call from a callback."""
        if self._is_training:
            raise TrainingError.cannot(
                f"{what} inside of training",
                why=f"a callback has called {call}",
                instead="leave it out: training continues after the callback",
            )

    def _warn_if_over(self) -> None:
        """Say why nothing is trained."""
        if self.run.ended is not None:
            why = f"the run has ended ({self.run.ended}); to train on, pass even_if_stopped=True "
            why += "to fit(), or --even-if-stopped to stretto train"
        elif self.run.is_done and self._setup.has_other_length:
            at, length = self.timer.timestamp, self.run.horizon.max_duration
            why = f"it was trained for {at.get('ba')} already, and max_duration is '{length}'"
        else:
            return
        if self._ranks.is_first:
            warnings.warn(f"nothing is trained: {why}", RuntimeWarning, stacklevel=3)

    def _leave(self) -> None:
        self._is_training = False

    def evaluate(self) -> dict[str, float]:
        """Measure the model on every evaluation's data and return it by `name/metric`.

        Called while `fit` runs it is also logged, as what is measured on time is. Looking changes
        nothing: batch sizes, the best checkpoint and events follow what is measured on time alone.
        """
        for one in self.callbacks:
            if overrides(one, "on_evaluation_start") and not overrides(one, "evaluating"):
                message = f"{type(one).__name__}.on_evaluation_start is not called by evaluate(); "
                message += "what changes the model for an evaluation belongs in evaluating()"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        return self._loop.evaluations.look()

    @knows_foreign
    def resume(self, path: str | Path = "latest", *, unpickle: bool = False) -> Path | None:
        """Continue from a checkpoint. Every rank must call it.

        The newest whole checkpoint of the folder and of `Checkpointing(upload=)` is used, with a
        warning for each newer one that is damaged. What cannot be reached is an error.

        Args:
            path: `"auto"`: the newest, or none if there is none; `"latest"`: the newest; else the
                path of a checkpoint, the folder of another run, or the address that another run
                uploads to, such as `"s3://bucket/run"`.
            unpickle: read the weights, and nothing else, of a folder of
                `torch.distributed.checkpoint`. Its pickle can run any code: trust where it is from.

        Returns:
            What was resumed from; None if `"auto"` finds nothing.

        Raises:
            CheckpointError: there is none, or it is damaged or belongs to another run.
            TrainingError: the newest is asked for and the run has no folder, or another live run
                writes to that; or a callback calls it while the run trains.
        """
        self._check_outside("resume", "resume()")
        self._setup.read(self.run)
        if unpickle:
            folder = local_path(path, "resume from", CheckpointError)
            unused = load_dcp_weights(self.model, folder)
            self.changes = (
                f"weights: those of {folder}; all else begins anew",
                *(f"{name}: not used" for name in unused),
            )
            return folder
        store = self._loop.saver.store
        with find_checkpoint(path, self.folder, self._ranks, store) as found:
            if found is not None:
                self._restore(found)
            elif not self.timer.batch:
                self._loop.recorder.files.lengths = dict.fromkeys(RESUMED_FILES, 0)
        return found

    def _restore(self, found: Path) -> None:
        self.run.ended, self._is_resumed = None, True
        self._weights.train()  # a checkpoint has the state of that
        dropped = self._loop.saver.restore(found)
        if self._loop.saver.saved_at is None:  # of another folder, so this is another run
            self._setup.run_id = secrets.token_hex(8)
        self._loop.stepper.resumed_from = found
        self.changes = (*self._setup.changes, *dropped)
        self._loop.recorder.files.resumed = found, self.changes
        self.run.refused = self.run.prepared.refused
        if self.run.prepared.is_quick:  # if not, the loader checks what it can
            self.run.plan  # noqa: B018  making it checks the stages that are still to come

    def _refused(self) -> StrettoError | None:
        """Return why the run cannot begin, or why there is no plan.

        Schedules that do not fit these batch sizes may fit a run that is resumed with them.
        One process can train on any plan, unless its data cannot count the tokens that it needs.
        A stage that several ranks cannot share may be over in the checkpoint that is resumed next.
        """
        self.run.refused = None
        try:
            if self.run.prepared.refused is not None:
                return self.run.prepared.refused
            if self._ranks.world_size == 1:
                check_tokens(self.run.prepared)
            elif self.run.prepared.is_quick:
                self.run.plan  # noqa: B018  making it checks it
        except PlanError as refusal:
            if self._ranks.world_size > 1:
                return refusal
            if not self.run.loader.tracks_tokens:
                raise
        return None


def placed_step(
    model: nn.Module | TrainStep,
    optimizer: Optimizer | None,
    loss: LossFunction | None,
    *,
    computing: Computing,
    loss_reduction: Literal["mean", "sum"],
    strategy: Strategy,
) -> TrainStep:
    """Return the step of a run, its model on the device of this rank."""
    if isinstance(model, TrainStep):
        model.model = strategy.place(model.model)
        model.transforms = ()  # those of another run
        return model
    assert optimizer is not None, "checked"
    assert loss is not None, "checked"
    if isinstance(loss, CriterionLoss):
        loss.to(strategy.ranks.device)
    return SupervisedStep(
        strategy.place(model),
        optimizer,
        loss,
        precision=computing.precision,
        clip_norm=computing.clip_norm,
        loss_reduction=loss_reduction,
        compile=computing.compile,
        device=strategy.ranks.device.type,
    )
