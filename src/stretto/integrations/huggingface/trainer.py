"""What `attach` adds to a trainer: the run, a dataloader of steps, a callback, and methods."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import SchedulerType, Trainer, TrainerCallback
from transformers import __version__ as version
from transformers.trainer_callback import ExportableState

from stretto.batching import NO_SIGNALS, Tokens
from stretto.batching.metrics import one_metric
from stretto.data import Step, StepLoader, count_target_tokens
from stretto.data.tokens import IGNORED_LABEL
from stretto.data.weights import Units, unit_counter, units_of
from stretto.errors import CheckpointError, TrainingError
from stretto.integrations.counts import end_of, steps_in_epoch, steps_left
from stretto.integrations.huggingface.losses import (
    LossKind,
    ignored_pixel,
    keeps_kind,
    measure,
    tried,
    units,
)
from stretto.integrations.loss_checks import WEIGH, StepChecks, warn_of_batch_norm
from stretto.integrations.shared import (
    BY_SIZE,
    ClockScheduler,
    Pass,
    Probe,
    StepMeter,
    counted_as_collated,
    has_random_order,
    note_metrics,
    refuse,
    warn_of_end,
    with_lengths,
)
from stretto.run import Run, prepare
from stretto.settings import Loading
from stretto.timing import Timestamp

_EVENTS = ("evaluate", "save", "log")
"""What a trainer can do during a run."""
_MEANS = frozenset(
    {
        "BinaryCrossEntropyLoss", "ContrastiveLoss", "CosineSimilarityLoss", "CrossEntropyLoss",
        "DistillKLDivLoss", "EmbedDistillLoss", "MSELoss", "MarginMSELoss", "SoftmaxLoss",
        "TripletLoss",
    }
)  # fmt: skip
"""Losses of sentence-transformers that are means over samples."""


def check_hugging_face(trainer: Any, every: Mapping[str, Any]) -> None:
    """Refuse a trainer that cannot be followed, or would train on something else.

    Raises:
        TrainingError: it is such a one.
    """
    args, steps = trainer.args, trainer.args.gradient_accumulation_steps
    is_other = any(name[0] != "_" and not hasattr(Trainer, name) for name in vars(Follows))
    unknown = set(every) - set(_EVENTS)
    is_parallel = any(getattr(trainer, f"get_{one}_size")() > 1 for one in ("tp", "cp", "sp"))
    is_apart = args.world_size > 1 and not args.average_tokens_across_devices
    is_lost = args.load_best_model_at_end and len(every) and args.save_strategy != "best"
    own = trainer.lr_scheduler
    own = None if isinstance(own, ClockScheduler) else own  # that of the training before
    refuse(
        (is_other, f"use transformers {version}", "it has other hooks", "install 5.22 to 5.24"),
        (unknown, f"wait for {unknown}", "there is no such event", f"write one of {_EVENTS}"),
        (steps != 1, f"use gradient_accumulation_steps={steps}", BY_SIZE, "leave it out"),
        (trainer.is_deepspeed_enabled, "use DeepSpeed", BY_SIZE, "use DDP or FSDP2"),
        (args.n_gpu > 1, "use nn.DataParallel", "it cuts micro-batches again", "use torchrun"),
        (is_parallel, "share samples among ranks", "it is not tested", "use DDP or FSDP2"),
        (is_apart, "turn average_tokens_across_devices off", "the mean is wrong", "leave it on"),
        (own, "follow two schedules", "the trainer has a scheduler object", "pass schedules"),
        (is_lost, "find the best model with every", "none is noted", "write save_strategy='best'"),
    )


def check_loss(trainer: Any, run: Run, kind: LossKind | None) -> None:
    """Refuse a loss that cannot be computed in parts, if ranks or micro-batches share a step.

    Raises:
        TrainingError: the trainer has such a loss.
    """
    packages = {one.__module__.partition(".")[0] for one in type(trainer).__mro__}
    own = trainer.loss if "sentence_transformers" in packages else None
    if kind is not None and (own is None or _is_known_mean(own)):
        return
    sizes, bounds = run.prepared.sizes, run.prepared.bound_policy.bounds
    found = [one.whole_sizes[1] for one in sizes.stages] if sizes else bounds or ()
    most = run.micro_batch_size or math.inf
    is_whole = max(found, default=math.inf) <= (0 if isinstance(most, Tokens) else most)
    is_whole = is_whole and run.world_size == 1 and "noise" not in run.loader.reads
    name = type(trainer.model if own is None else own).__name__
    what = f"compute the loss of {name} in micro-batches or on several ranks"
    why = "it may compare samples, weigh classes, or add a term such as that of a router"
    instead = (
        "pass units= to attach: 'samples', 'tokens', or a function that counts what it is a mean "
        "over, such as units=lambda batch: batch['mask'].sum(); if it is no mean, train on one "
        "rank with per_device_train_batch_size of the largest batch"
    )
    refuse((not is_whole, what, why, instead))


def _is_known_mean(loss: Any) -> bool:
    """Return whether a loss of sentence-transformers is known to be a mean over samples."""
    if isinstance(loss, Mapping):
        return all(map(_is_known_mean, loss.values()))
    kind = type(loss)
    # With `n_dims_per_step`, each micro-batch would draw its own dimensions.
    if kind.__name__ == "MatryoshkaLoss" and loss.n_dims_per_step < 1:
        return _is_known_mean(loss.loss)
    return kind.__module__.startswith("sentence_transformers.") and kind.__name__ in _MEANS


@final
class TrainerLoader:
    """The train dataloader: as long as an epoch of steps. The trainer draws them from the run."""

    def __init__(self, run: Run, dataset: Any) -> None:
        self.run, self.dataset = run, dataset
        self.end, num_samples = end_of(run), run.horizon.dataset_num_samples
        most = steps_left(run, Timestamp()).most
        self.num_steps = sys.maxsize if most is None else most
        self.longest, self.num_epochs = self.num_steps, sys.maxsize
        if num_samples and self.end:
            self.num_epochs = math.ceil(self.end / num_samples)
            each = (steps_in_epoch(run, epoch).most for epoch in range(self.num_epochs))
            self.longest = max(self.num_steps if one is None else one for one in each)

    def __len__(self) -> int:
        if self.longest == sys.maxsize:
            raise TypeError("the number of steps is not known")
        return self.longest

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of one rank from the beginning; a run does not notice.

        Raises:
            TrainingError: the data are a stream, whose place would change.
        """
        run, instead = self.run, "iterate over trainer.train_dataset"
        is_stream, micro = not run.spec.is_map_style, run.micro_batch_size
        refuse((is_stream, "look at batches of a stream", "its place would change", instead))
        loader = StepLoader(run.spec, run.prepared, loading=run.loading, rank=0, world_size=1)
        loader.set_micro_batch_size(micro or 1)
        for step in loader:
            yield from (one.batch for one in step)


@final
class StrettoCallback(TrainerCallback, ExportableState):
    """What `attach` adds to a trainer; `trainer.stretto` is it.

    It moves the clock after each step. `trainer_state.json` has the state of the run.
    """

    look: Callable[[], TrainerLoader]
    """Prepares a run as the settings of the trainer are now."""
    facts: Mapping[str, Any]
    """Fields of `DataSpec`."""
    steps: Iterator[Step]
    """Those of the present epoch."""
    meter: StepMeter | None
    """None before the first step."""
    kind: LossKind | None
    """What the loss is a mean over; None: nothing known, so a step is one micro-batch."""
    units: Units | None
    """What the user says that it is a mean over; then it is not measured."""
    checks: StepChecks
    present: Pass
    """The present micro-batch."""
    divisor: LossKind | None
    """What counts the number that a loss is divided by; None: the trainer does."""
    num_cut: int
    """Steps of several micro-batches or ranks in this call of `trainer.train()`."""
    is_counted: bool
    """Whether the number of steps that are left is known."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        self.settings = settings  # without any if transformers restores it; it is then replaced
        self.weight: float | None = None
        self.is_weighed = False
        """Whether the loss of the present micro-batch has its weight."""
        self.doubts: Callable[..., None] | None = None
        """Refuses a loss of the present step; None: it is not looked at."""
        self.probe = Probe("compute_loss")
        self.num_items: Any = None
        """What the losses of the present step are divided by."""
        self.signals = NO_SIGNALS
        self.begun: Run | None = None
        """The run of the last call of `trainer.train()`."""
        self.saved: dict[str, Any] | None = None
        """The state of the run in the last checkpoint."""

    @property
    def run(self) -> Run:
        """The run, whose clock is `run.timer`; before `train()`, as the settings are now."""
        return self.look().run if self.begun is None else self.begun

    @run.setter
    def run(self, run: Any) -> None:  # transformers restores `state()` into an unused callback
        self.begun = run

    def state(self) -> dict[str, Any]:
        """Return the state of the run, for `trainer_state.json`."""
        return {"args": {}, "attributes": {"run": self.saved}}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to draw the steps of an epoch."""
        self.steps = self.run.steps()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Count the step; say what is due."""
        run = self.run
        due = run.finish(self.signals)
        state.epoch = run.clock()["ep"]
        for name in due:
            setattr(control, f"should_{name}", True)
        if run.is_done:
            state.max_steps = state.global_step  # the flow callback comes next, and stops the run
        elif not self.is_counted:
            end, left = end_of(run), state.max_steps - state.global_step
            if end is not None:  # as if the size stayed as it is
                assert run.step is not None, "finished"
                left = -(-(end - run.timer.sample) // run.step.num_samples)
            state.max_steps = state.global_step + max(1, left)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warn if the run has not reached its end, and no callback has stopped it."""
        if not control.should_training_stop or state.global_step >= state.max_steps:
            warn_of_end(self.run, "The trainer", "trainer.train(resume_from_checkpoint=True)")

    def on_evaluate(self, *_: Any, metrics: Mapping[str, Any], **__: Any) -> None:
        """Give the run the metric that it follows: `eval/loss` for what is called `eval_loss`."""
        if self.begun is not None:
            given = {name.replace("_", "/", 1): metrics[name] for name in metrics}
            note_metrics(self.begun, given)


class Follows(Trainer):
    """Stands left of the class of a trainer, so `super()` is that class."""

    stretto: StrettoCallback
    control: Any
    lr_scheduler: Any

    def get_train_dataloader(self) -> TrainerLoader:
        """Prepare a run of the data and the order of the stock dataloader.

        All arguments are read here: a search over hyper-parameters sets them in `train()`, which
        takes the run in `set_initial_training_values`.
        """
        args, own = self.args, self.stretto
        check_hugging_face(self, own.settings["every"])
        args.ignore_data_skip = True  # the run itself finds its place in the data
        if not args.auto_find_batch_size:
            self._train_batch_size = args.train_batch_size
        stock, workers = super().get_train_dataloader(), args.dataloader_num_workers
        data, settings = stock.dataset, dict(own.settings)
        length = f"{args.max_steps}ba" if args.max_steps > 0 else f"{args.num_train_epochs}ep"
        defaults = {
            "max_duration": length,
            "micro_batch_size": self._train_batch_size,
            "last_batch": "drop" if args.dataloader_drop_last else "keep",
        }
        settings |= {name: one for name, one in defaults.items() if settings[name] is None}
        seed = args.seed if args.data_seed is None else args.data_seed
        loading = Loading(seed=seed, last_batch=settings.pop("last_batch"))
        if isinstance(data, IterableDataset):  # as the stock dataloader reads it on all ranks
            while isinstance(data, IterableDatasetShard):
                data = data.dataset
            batches: Any = DataLoader(
                data,
                self._train_batch_size * args.world_size,
                collate_fn=stock.collate_fn,
                num_workers=workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                generator=torch.Generator(),  # the seed of workers, not from that of the run
            )
            if not workers and hasattr(data, "state_dict"):
                batches.state_dict, batches.load_state_dict = data.state_dict, data.load_state_dict
            data = batches
        else:
            loading = replace(
                loading,
                shuffle=has_random_order(stock),
                collate_fn=stock.collate_fn,
                num_workers=workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                pin_memory=args.dataloader_pin_memory,
            )
        curve: list[Callable[[float], float]] = [lambda _: 1.0]
        if settings["schedules"] is None:
            settings["schedules"] = {"lr": lambda timer: curve[0](timer.get_elapsed_duration())}
        run = prepare(counted_as_collated(data, **own.facts), loading=loading, **settings)
        found = TrainerLoader(with_lengths(run), stock.dataset)
        if own.settings["schedules"] is None:
            curve[0] = self._stock_curve(found.num_steps)
        return found

    def set_initial_training_values(self, args: Any, dataloader: TrainerLoader) -> tuple[Any, ...]:
        """Take the run, and return its numbers; see `Trainer`."""
        self.stretto.run = dataloader.run
        longest, end = dataloader.longest, dataloader.end or 0
        num_samples = dataloader.run.horizon.dataset_num_samples or end
        size, num_steps = self.get_total_train_batch_size(args), dataloader.num_steps
        return dataloader.num_epochs, longest, num_samples, end, size, longest, num_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Bind the run to the optimizer, and continue it if the trainer resumes."""
        own, optimizer = self.stretto, self.optimizer if optimizer is None else optimizer
        rank, world_size = self.args.process_index, self.args.world_size
        own.run.bind(optimizer, rank=rank, world_size=world_size)
        metric, how = one_metric(own.run.loader.reads), "pass every={'evaluate': '10%'} to attach"
        never = self.args.eval_strategy == "no" and "evaluate" not in (own.settings["every"] or ())
        refuse((metric and never, f"follow {metric!r}", "the trainer never evaluates", how))
        own.meter = None
        self.lr_scheduler = ClockScheduler(optimizer, own.run.timer)
        callbacks = self.callback_handler.callbacks  # first, so that others see the right epoch
        callbacks[:] = [own, *(one for one in callbacks if type(one) is not StrettoCallback)]
        if self.state.global_step:
            saved = self.state.stateful_callbacks.get(StrettoCallback.__name__, {})
            state = saved.get("attributes", {}).get("run")
            if state is None:
                what = f"resume at step {self.state.global_step}"
                why, instead = "stretto was not attached when it was saved", "start anew"
                raise CheckpointError.cannot(what, why=why, instead=instead)
            own.run.load_state_dict(state)
        left = steps_left(own.run).exact
        own.is_counted = left is not None
        self.state.max_steps = num_training_steps if left is None else own.run.timer.batch + left
        return self.lr_scheduler

    def _stock_curve(self, num_steps: int) -> Callable[[float], float]:
        """Return what `lr_scheduler_type` says, as a function of the part of the run."""
        what = f"follow lr_scheduler_type={SchedulerType(self.args.lr_scheduler_type).value!r}"
        instead = "pass schedules={'lr': Cosine(warmup='5%')}"
        refuse((num_steps == sys.maxsize, what, "the number of steps is not known", instead))
        self.lr_scheduler, kept = None, self.lr_scheduler
        unused = torch.optim.SGD([torch.zeros(1)], lr=self.args.learning_rate)
        found = super().create_scheduler(num_steps, unused)
        self.lr_scheduler = kept
        refuse((type(found) is not LambdaLR, what, "it is no function of the step", instead))
        factor: Callable[[Any], float] = found.lr_lambdas[0]
        return lambda elapsed: float(factor(elapsed * num_steps))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return one step as the only batch, and the targets in it over all ranks."""
        step = next(self.stretto.steps, None)
        if step is None:
            self.control.should_epoch_stop = True
            return [], None
        each = [one.batch if one.num_samples else _labelled(one.batch) for one in step]
        return [step], super().get_batch_samples(iter(each), len(each), device)[1]

    def training_step(self, model: Any, inputs: Step, num_items_in_batch: Any = None) -> Any:
        """Run the micro-batches of a step; return its loss."""
        own, accelerator, world_size = self.stretto, self.accelerator, self.args.world_size
        num_items_in_batch = self._measured(model, inputs, num_items_in_batch)
        assert own.meter is not None, "made"
        meter, losses = own.meter, []
        counted: Units = "samples"
        is_divided = own.kind is None or own.kind.startswith("divided")  # by the loss itself
        if own.units is not None:
            num_items_in_batch, counted, is_divided = None, own.units, False
        elif own.kind is not None and not is_divided:
            num_items_in_batch, counted = None, units(own.kind, ignored_pixel(self.model))
        elif num_items_in_batch is not None and "noise" in own.run.loader.reads:
            counted = count_target_tokens
        own.num_items = num_items_in_batch
        # What is said is not measured, but a sum is no mean.
        checks = None if own.units is None else own.checks.begin(len(inputs))
        own.doubts = None if checks is None else checks.before_pass
        for one_pass in meter.passes(inputs, counted):
            is_last, own.weight = one_pass.is_last, one_pass.weight
            if is_divided:
                share = world_size if own.kind == "divided on its rank" else 1
                own.weight = float(share if one_pass.num_samples else 0)
            meets = nullcontext() if is_last or meter.averages_each else accelerator.no_sync(model)
            accelerator.gradient_state._set_sync_gradients(is_last)
            # A mean over no targets is nan, also with a weight of 0.
            batch = one_pass.batch if own.weight else _labelled(one_pass.batch, 0)
            own.is_weighed, own.present = False, one_pass
            with meets, one_pass.watch:
                losses.append(super().training_step(model, batch, num_items_in_batch))
            is_lost = not own.is_weighed and (len(inputs) > 1 or world_size > 1)
            why, how = (
                "training_step calls no compute_loss",
                "call self.compute_loss(model, inputs)",
            )
            refuse((is_lost, WEIGH, why, how))
            if not is_last:
                handler = self.callback_handler
                self.control = handler.on_substep_end(self.args, self.state, self.control)
        own.weight, own.num_items = None, None
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        own.signals = meter.signals(loss, accelerator.scaler)
        return loss

    def _measured(self, model: Any, step: Step, num_items: Any) -> Any:
        """Measure what the loss is a mean over; return the number that it is divided by.

        Raises:
            TrainingError: it cannot be computed in micro-batches, or is not what it was.
        """
        own, ranks = self.stretto, self.stretto.run.loader.ranks
        inner = getattr(model, "_orig_mod", model)
        # The passes of DDP meet those of other ranks, where an exception may have ended the trial.
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        if own.meter is None:  # the first step
            own.meter, own.num_cut, own.probe = StepMeter(own.run, model), 0, Probe("compute_loss")
            own.kind, own.divisor, refused = None, None, None
            own.checks = StepChecks(own.run, own.units)
            if own.units is None:
                try:
                    with own.probe.beside(inner, self):
                        own.kind, own.divisor = measure(self, inner, step.micro_batches, num_items)
                except TrainingError as error:  # the loss is finite on no rank, or so it seems
                    refused = error
                if own.kind is None and ranks.agree([own.probe.error is not None])[0]:
                    divides = num_items is not None and self.model_accepts_loss_kwargs
                    own.kind = "divided" if divides else "samples"  # as transformers takes it
                elif refused is not None:
                    raise refused
                check_loss(self, own.run, own.kind)
        if len(step) > 1 and not own.num_cut:
            warn_of_batch_norm(model)
        if num_items is not None and own.divisor is not None:
            counted = unit_counter(units(own.divisor, ignored_pixel(self.model)))
            found = units_of(step, counted, ranks)[1]
            num_items = torch.as_tensor(found, device=self.args.device).to(torch.int64)
        is_cut = len(step) > 1 or self.args.world_size > 1
        own.num_cut += is_cut
        if is_cut and own.kind is not None and own.num_cut.bit_count() == 1:
            with own.probe.beside(inner, self):
                is_kept = keeps_kind(self, inner, step.micro_batches[:2], num_items)
            check_loss(self, own.run, own.kind if is_kept else None)
        own.probe.tell()
        return num_items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch with its weight in the step."""
        weight, probe = self.stretto.weight, self.stretto.probe
        if num_items_in_batch is None and weight is not None:
            # It is a second loss, of a training_step of the user's.
            num_items_in_batch = self.stretto.num_items
        options = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        compute = super().compute_loss
        if probe.is_open:
            return probe(tried, lambda: compute(model, copy.deepcopy(inputs), **options))
        found, self.stretto.is_weighed = compute(model, inputs, **options), True
        if self.stretto.doubts is not None and weight:
            loss = found[0] if return_outputs else found
            self.stretto.doubts(loss, self.stretto.present, 1.0)
        if weight is None or weight == 1.0:
            return found
        return (found[0] * weight, found[1]) if return_outputs else found * weight

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        """Log the batch size and the clock beside the loss."""
        if self.stretto.probe.is_open:
            return
        if "loss" in logs:
            run = self.stretto.run
            logs |= {"batch_size": run.batch_size, "samples": run.timer.sample}
            logs |= {"tokens": run.timer.token} if run.timer.token else {}
        super().log(logs, *rest)

    def save_model(self, *given: Any, **options: Any) -> None:
        """Save the model, and note the state of the run: only the first rank saves callbacks."""
        run = self.stretto.begun
        if run is not None and run.is_bound:
            self.stretto.saved = run.state_dict()
        super().save_model(*given, **options)

    def floating_point_ops(self, inputs: Step) -> int:
        """Return the operations of a step on this rank."""
        each = super().floating_point_ops
        return sum(each(micro.batch) for micro in inputs if micro.num_samples)

    def _track_num_input_tokens(self, inputs: Step) -> None:
        for micro in inputs:
            super()._track_num_input_tokens(micro.batch)


def _labelled(batch: Any, label: int = IGNORED_LABEL) -> Any:
    """Return the batch with all labels of this class; -100: without targets."""
    found = dict(batch)
    for name in found.keys() & {"labels", "shift_labels"}:
        if isinstance(found[name], torch.Tensor):
            found[name] = torch.full_like(found[name], label)
    return found
