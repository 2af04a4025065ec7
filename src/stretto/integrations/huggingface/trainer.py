"""What `attach` adds to a trainer: the run, a dataloader of steps, a callback, and methods."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, final

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback
from transformers import __version__ as transformers_version
from transformers.trainer_callback import ExportableState

from stretto.batching import NO_SIGNALS, split
from stretto.data import DataSpec, Step, count_target_tokens
from stretto.data.tokens import IGNORED_LABEL
from stretto.data.weights import units_of
from stretto.errors import CheckpointError, TrainingError
from stretto.integrations.huggingface.losses import Kind, ignored_pixel, measure, units
from stretto.integrations.shared import ClockScheduler, StreamBatches, is_shuffled
from stretto.noise import NoiseMeter
from stretto.planning.bind import end_of
from stretto.run import Run, prepare
from stretto.settings import Loading
from stretto.timing import LastBatch

EVENTS = ("evaluate", "save", "log")
"""What a trainer can do now and then."""
_MEANS = frozenset(
    {
        "BinaryCrossEntropyLoss", "ContrastiveLoss", "CosineSimilarityLoss", "CrossEntropyLoss",
        "DistillKLDivLoss", "EmbedDistillLoss", "MSELoss", "MarginMSELoss", "SoftmaxLoss",
        "TripletLoss",
    }
)  # fmt: skip
"""Losses of sentence-transformers that are means over samples."""


_HOOKS = (
    "get_train_dataloader", "set_initial_training_values", "create_scheduler", "get_batch_samples",
    "training_step", "compute_loss", "floating_point_ops", "get_tp_size", "get_cp_size",
    "get_sp_size",
)  # fmt: skip
"""The methods of a trainer that are used or extended."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse a trainer with settings that cannot be followed.

    Raises:
        TrainingError: it has one.
    """
    missing = [name for name in _HOOKS if not hasattr(Trainer, name)]
    hook = getattr(Trainer, "set_initial_training_values", None)
    if missing or list(inspect.signature(hook or len).parameters) != ["self", "args", "dataloader"]:
        raise TrainingError.cannot(
            f"use transformers {transformers_version}",
            why=f"its trainer has no {missing[0]}" if missing else "its trainer has other hooks",
            instead="install transformers 5.23, or a version with the same hooks",
        )
    args = trainer.args
    parallel = [one for one in ("tp", "cp", "sp") if getattr(trainer, f"get_{one}_size")() > 1]
    refusals = {
        f"use gradient_accumulation_steps={args.gradient_accumulation_steps}": (
            args.gradient_accumulation_steps != 1,
            "micro-batches follow from the batch size",
            "leave it out",
        ),
        f"use {args.n_gpu} GPUs in one process": (
            args.n_gpu > 1,
            "nn.DataParallel splits micro-batches again",
            "start one process for each GPU, with torchrun",
        ),
        "use DeepSpeed": (
            trainer.is_deepspeed_enabled,
            "its engine accumulates gradients by itself and is not tested",
            "use DDP or FSDP2",
        ),
        f"use {' and '.join(parallel)} parallelism": (
            bool(parallel),
            "several ranks would share a sample, which is not tested",
            "use DDP or FSDP2",
        ),
        "use average_tokens_across_devices=False": (
            args.world_size > 1 and not args.average_tokens_across_devices,
            "the gradient would not be that of the whole batch",
            "leave it out",
        ),
        "follow two schedules of the learning rate": (
            trainer.lr_scheduler is not None,
            "the trainer was given a scheduler object, which counts steps",
            "leave it out, and pass schedules={'lr': ...}",
        ),
    }
    for what, (is_wrong, why, instead) in refusals.items():
        if is_wrong:
            raise TrainingError.cannot(what, why=why, instead=instead)


def check_best(trainer: Trainer, every: Mapping[str, Any]) -> None:
    """Refuse to load the best model where the trainer would not note which one it is.

    Raises:
        TrainingError: it would not.
    """
    if trainer.args.load_best_model_at_end and every and trainer.args.save_strategy != "best":
        raise TrainingError.cannot(
            f"use load_best_model_at_end with every={dict(every)!r}",
            why="the trainer notes the best model only where its own strategies evaluate and save",
            instead="write save_strategy='best', or leave every out and set eval_strategy and "
            "save_strategy",
        )


def check_events(every: Mapping[str, Any]) -> None:
    """Refuse events that a trainer does not have.

    Raises:
        TrainingError: there is one.
    """
    for name in set(every) - set(EVENTS):
        raise TrainingError.cannot(
            f"wait for {name!r}",
            why="a trainer does nothing of that name now and then",
            instead=f"write one of {', '.join(map(repr, EVENTS))}",
        )


def check_loss(trainer: Any, run: Run, kind: str | None) -> None:
    """Refuse a loss that cannot be computed in parts, if ranks or micro-batches share a step.

    Raises:
        TrainingError: the trainer has such a loss.
    """
    own = getattr(trainer, "loss", None)
    others = [] if own is None else [one for one in _losses(own) if _name(one) not in _MEANS]
    if kind is not None and not others:
        return
    sizes, bounds = run.prepared.sizes, run.prepared.bound_policy.bounds
    planned = [one.batches.size for one in sizes.segments] if sizes else [0]
    largest = max(planned if sizes or bounds is None else bounds)
    share = split(largest, run.loader.world_size, run.micro_batch_size) if largest else None
    if share is None or share.accumulation > 1 or run.loader.world_size > 1:
        name = type(others[0]).__name__ if others else f"the loss of {type(trainer.model).__name__}"
        raise TrainingError.cannot(
            f"compute {name} in micro-batches of {run.micro_batch_size} "
            f"on {run.loader.world_size} ranks",
            why="the loss of a batch is not known to be a mean over its samples or targets: it "
            "may compare samples with each other, weigh classes, or add a term such as that of "
            "a router",
            instead="train on one rank and set per_device_train_batch_size to the largest batch, "
            "or leave the term out (for a router: output_router_logits=False)",
        )


def _losses(loss: Any) -> list[Any]:
    """Return the losses of a trainer of sentence-transformers, also those inside wrappers."""
    if isinstance(loss, Mapping):
        return [inner for one in loss.values() for inner in _losses(one)]
    # With `n_dims_per_step`, each micro-batch would draw its own dimensions.
    is_wrapper = _name(loss) == "MatryoshkaLoss" and loss.n_dims_per_step < 1
    return _losses(loss.loss) if is_wrapper else [loss]


def _name(loss: Any) -> str | None:
    """Return the name of a loss of sentence-transformers itself."""
    kind = type(loss)
    return kind.__name__ if kind.__module__.startswith("sentence_transformers.") else None


@final
class Attached:
    """What `attach` adds to a trainer; `trainer.stretto` is it."""

    def __init__(
        self,
        trainer: Any,
        settings: Mapping[str, Any],
        last_batch: LastBatch,
        facts: Mapping[str, Any],
    ) -> None:
        self.settings, self.last_batch, self.facts = settings, last_batch, facts
        self.callback = StrettoCallback(trainer)
        self.run: Run
        """The run: its clock is `run.timer`."""
        self.curve: Callable[[float], float]
        self.is_counted = False
        """Whether the number of steps that are left is known."""
        self.weight: float | None = None
        self.kind: Kind | None = None
        """What the loss is a mean over; None: nothing known, so a step is one micro-batch."""
        self.is_measured = False
        self.signals = NO_SIGNALS
        self._meter: tuple[Any, NoiseMeter] | None = None

    def begin(self, spec: DataSpec, loading: Loading) -> Run:
        """Prepare the run for a call of `trainer.train()`."""
        settings = dict(self.settings)
        if settings["schedules"] is None:
            settings["schedules"] = {"lr": lambda timer: self.curve(timer.get_elapsed_duration())}
        self.run = prepare(spec, loading=loading, **settings)
        return self.run

    def meter(self, model: Any) -> NoiseMeter | None:
        """Return what measures noise, if the policy reads it."""
        if "noise" not in self.run.loader.reads:
            return None
        if self._meter is None or self._meter[0] is not model:
            self._meter = model, NoiseMeter.of(model, self.run.loader.spec)
        return self._meter[1]


@final
class Steps:
    """The train dataloader: one pass over it is one epoch of steps."""

    def __init__(self, run: Run, dataset: Any) -> None:
        self.run, self.dataset = run, dataset
        self.end, num_samples = end_of(run.prepared), run.horizon.dataset_num_samples
        most = run.num_steps.most
        self.num_steps = sys.maxsize if most is None else most
        self.longest, self.num_epochs = self.num_steps, sys.maxsize
        if num_samples and self.end:
            self.num_epochs = math.ceil(self.end / num_samples)
            each = (run.steps_in_epoch(epoch).most for epoch in range(self.num_epochs))
            self.longest = max(self.num_steps if one is None else one for one in each)

    def __len__(self) -> int:
        if self.longest == sys.maxsize:
            raise TypeError("the number of steps is not known")
        return self.longest

    def __iter__(self) -> Iterator[Step]:
        return self.run.steps()


@final
class StrettoCallback(TrainerCallback, ExportableState):
    """Moves the clock after each step; its state is saved in `trainer_state.json`."""

    def __init__(self, trainer: Any = None) -> None:
        self.trainer = trainer  # None if transformers restores callbacks; it is then replaced
        self.run: dict[str, Any] | None = None
        """The state of the run in the last checkpoint."""

    def state(self) -> dict[str, Any]:
        """Return the state of the run, for `trainer_state.json`."""
        return {"args": {}, "attributes": {"run": self.run}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Count the step; say what is due."""
        run: Run = self.trainer.stretto.run
        due = run.finish(self.trainer.stretto.signals)
        state.epoch = run.clock()["ep"]
        for name in due:
            setattr(control, f"should_{name}", True)
        if run.is_done:
            state.max_steps = state.global_step  # the flow callback comes next, and stops the run
        elif not self.trainer.stretto.is_counted:
            end, left = end_of(run.prepared), state.max_steps - state.global_step
            if end is not None:  # as if the size stayed as it is
                left = -(-(end - run.timer.sample) // run.batch_size)
            state.max_steps = state.global_step + max(1, left)
        return control

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Give the policy the metric that it follows."""
        if not self.trainer.stretto.run.is_bound:
            return  # an evaluation before the training
        loader = self.trainer.stretto.run.loader
        for name in loader.reads & set(metrics or {}):
            loader.note_metric(metrics[name])


class Follows(Trainer):
    """Stands left of the class of a trainer, so `super()` is that class."""

    stretto: Attached
    control: Any
    lr_scheduler: Any

    def get_train_dataloader(self) -> Steps:
        """Prepare the run of the data and the order of the stock dataloader."""
        stock, args, own = super().get_train_dataloader(), self.args, self.stretto
        seed = args.seed if args.data_seed is None else args.data_seed
        loading = Loading(seed=seed, last_batch=own.last_batch)
        if isinstance(stock.dataset, IterableDataset):
            data = self._stream(stock)
            spec = DataSpec.of(data, **own.facts)
        else:
            # A row need not be a sample: packing makes one of several, DPO two of each.
            counted = {"get_num_samples_in_batch": lambda _: None} | dict(own.facts)
            spec = DataSpec.of(stock.dataset, **counted)
            loading = replace(
                loading,
                shuffle=is_shuffled(stock),
                collate_fn=stock.collate_fn,
                num_workers=args.dataloader_num_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                pin_memory=args.dataloader_pin_memory,
            )
        return Steps(own.begin(spec, loading), stock.dataset)

    def _stream(self, stock: Any) -> Any:
        """Return batches of the stream that the stock dataloader reads on all ranks."""
        args, stream = self.args, stock.dataset
        while isinstance(stream, IterableDatasetShard):
            stream = stream.dataset
        size = self._train_batch_size * args.world_size
        if not args.dataloader_num_workers:
            return StreamBatches(stream, size, stock.collate_fn)
        return DataLoader(
            stream,
            size,
            collate_fn=stock.collate_fn,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def set_initial_training_values(self, args: Any, dataloader: Steps) -> tuple[Any, ...]:
        """Return the numbers of a run; see `Trainer`."""
        num_samples = dataloader.run.horizon.dataset_num_samples
        return (
            dataloader.num_epochs,
            dataloader.longest,
            num_samples or dataloader.end or 0,
            dataloader.end or 0,
            self.get_total_train_batch_size(args),
            dataloader.longest,
            dataloader.num_steps,
        )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Bind the run to the optimizer, and continue it if the trainer resumes."""
        own, optimizer = self.stretto, self.optimizer if optimizer is None else optimizer
        if own.settings["schedules"] is None:
            own.curve = self._stock_curve(num_training_steps)
        own.run.bind(
            optimizer,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            micro_batch_size=self._train_batch_size,
        )
        own.is_measured = False
        self.lr_scheduler = ClockScheduler(optimizer, own.run.timer)
        callbacks = self.callback_handler.callbacks  # first, so that others see the right epoch
        callbacks[:] = [own.callback, *(c for c in callbacks if type(c) is not StrettoCallback)]
        if self.state.global_step:
            saved = self.state.stateful_callbacks.get(StrettoCallback.__name__, {})
            if saved.get("attributes", {}).get("run") is None:
                raise CheckpointError.cannot(
                    f"resume at step {self.state.global_step}",
                    why="the checkpoint was not written with stretto attached",
                    instead="attach before the first step, or start anew",
                )
            own.run.load_state_dict(saved["attributes"]["run"])
        left = own.run.steps_left.exact
        own.is_counted = left is not None
        self.state.max_steps = num_training_steps if left is None else own.run.timer.batch + left
        return self.lr_scheduler

    def _stock_curve(self, num_steps: int) -> Callable[[float], float]:
        """Return what `lr_scheduler_type` says, as a function of the part of the run."""
        if num_steps < sys.maxsize:
            return self._curve_of(num_steps)
        # The number of steps is not known, so the curve must be the same for any.
        curves = [self._curve_of(number) for number in (1000, 4000)]
        if any(abs(curves[0](at / 50) - curves[1](at / 50)) > 2e-3 for at in range(1, 50)):
            raise TrainingError.cannot(
                f"follow lr_scheduler_type={str(self.args.lr_scheduler_type)!r}",
                why="its curve or its warm-up depends on the number of steps, which is not known "
                "before the run",
                instead="pass schedules={'lr': Cosine(warmup='5%')}, or write warmup_steps as a "
                "fraction such as 0.05",
            )
        return curves[1]

    def _curve_of(self, num_steps: int) -> Callable[[float], float]:
        self.lr_scheduler = None
        unused = torch.optim.SGD([torch.zeros(1)], lr=self.args.learning_rate)
        found = super().create_scheduler(num_steps, unused)
        if type(found) is not LambdaLR:
            raise TrainingError.cannot(
                f"follow lr_scheduler_type={self.args.lr_scheduler_type!r}",
                why="it is no function of the step",
                instead="pass schedules={'lr': ...}",
            )
        factor: Callable[[Any], float] = found.lr_lambdas[0]
        return lambda elapsed: float(factor(elapsed * num_steps))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return one step as the only batch, and the targets in it over all ranks."""
        step = next(epoch_iterator, None)
        if step is None:
            self.control.should_epoch_stop = True
            return [], None
        each = [
            one.batch if one.num_samples else _labelled(one.batch, IGNORED_LABEL) for one in step
        ]
        _, num_items = super().get_batch_samples(iter(each), len(each), device)
        return [step], num_items

    def training_step(self, model: Any, inputs: Step, num_items_in_batch: Any = None) -> Any:
        """Run the micro-batches of a step; return its loss."""
        own, accelerator, losses = self.stretto, self.accelerator, []
        meter = own.meter(model)
        micros = inputs.micro_batches if meter is None else meter.begin(inputs)
        if not own.is_measured:
            own.kind, own.is_measured = measure(self, model, micros, num_items_in_batch), True
            check_loss(self, own.run, own.kind)
        counts = total = None
        weights = [float(micro.num_samples > 0) for micro in micros]  # divided by the loss itself
        world_size = self.args.world_size
        if own.kind == "divided on its rank":
            weights = [one * world_size for one in weights]
        elif own.kind not in ("divided", None):
            num_items_in_batch, step = None, replace(inputs, micro_batches=list(micros))
            counted = units(own.kind, ignored_pixel(self.model))
            counts, total = units_of(step, counted, world_size=world_size)
            weights = [one * world_size / total for one in counts]
        for number, micro in enumerate(micros):
            is_last = number == len(micros) - 1
            meets = is_last or (meter is not None and meter.averages_each)
            accelerator.gradient_state._set_sync_gradients(is_last)
            own.weight = weights[number]
            with ExitStack() as stack:
                if not meets:
                    stack.enter_context(accelerator.no_sync(model))
                if meter is not None:
                    divisor = total or num_items_in_batch
                    count = None if counts is None else counts[number]
                    if count is None and divisor is not None:
                        count = count_target_tokens(micro.batch) if micro.num_samples else 0
                    stack.enter_context(
                        meter.watch(micro, is_last=is_last, units=count, divisor=divisor)
                    )
                # A mean over no targets is nan, also with a weight of 0.
                is_empty = counts is not None and not counts[number]
                batch = _labelled(micro.batch, 0) if is_empty else micro.batch
                losses.append(super().training_step(model, batch, num_items_in_batch))
            if not is_last:
                self.control = self.callback_handler.on_substep_end(
                    self.args, self.state, self.control
                )
        own.weight, loss = None, losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        own.signals = NO_SIGNALS
        if meter is not None:
            scaler = accelerator.scaler
            own.signals = meter.signals(1.0 if scaler is None else scaler.get_scale())
        if "loss" in own.run.loader.reads:
            own.signals = replace(own.signals, loss=accelerator.gather(loss).mean().item())
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch with its weight in the step."""
        found = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        weight = self.stretto.weight
        if weight is None or weight == 1.0:
            return found
        return (found[0] * weight, found[1]) if return_outputs else found * weight

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        """Log the batch size and the clock beside the loss."""
        if "loss" in logs:
            run = self.stretto.run
            logs |= {"batch_size": run.batch_size, "samples": run.timer.sample}
            logs |= {"tokens": run.timer.token} if run.timer.token else {}
        super().log(logs, *rest)

    def save_model(self, *given: Any, **options: Any) -> None:
        """Save the model, and note the state of the run: only the first rank saves callbacks."""
        if self.stretto.run.is_bound:
            self.stretto.callback.run = self.stretto.run.state_dict()
        super().save_model(*given, **options)

    def floating_point_ops(self, inputs: Step) -> int:
        """Return the operations of a step on this rank."""
        each = super().floating_point_ops
        return sum(each(micro.batch) for micro in inputs if micro.num_samples)

    def _track_num_input_tokens(self, inputs: Step) -> None:
        for micro in inputs:
            super()._track_num_input_tokens(micro.batch)


def _labelled(batch: Any, label: int) -> Any:
    """Return the batch with all labels of this class; -100: without targets."""
    return {
        name: torch.full_like(value, label)
        if name in ("labels", "shift_labels") and isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }
