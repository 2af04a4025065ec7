"""Parts that several adapters use."""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from stretto.batching import NO_SIGNALS, Signals, Tokens, checked_size
from stretto.batching.metrics import measured_value, one_metric
from stretto.data import DataSpec, Step
from stretto.data.weights import UnitCounter, Units, copied, unit_counter, units_of
from stretto.errors import DataError, TrainingError, first_line, shown
from stretto.integrations.counts import steps_between, steps_left
from stretto.noise import NoiseMeter
from stretto.run import Run
from stretto.runtime.rewind import kept_buffers
from stretto.timing import Timer, TimeUnit

BY_SIZE = "the batch size decides how many micro-batches a step has"
"""Why an accumulation of the framework's own is refused."""


def refuse(*rows: tuple[object, str, str, str]) -> None:
    """Raise for the first row that is wrong.

    Args:
        rows: whether it is wrong, what cannot be done, why, and what to write instead.

    Raises:
        TrainingError: a row is wrong.
    """
    for is_wrong, what, why, instead in rows:
        if is_wrong:
            raise TrainingError.cannot(what, why=why, instead=instead)


def check_call(
    call: str, kind: type, owner: Any, batch_size: Any, **named: Mapping[str, Any] | None
) -> None:
    """Refuse arguments of `attach` in another order, and those that are not by name.

    Args:
        call: how `attach` is called, for the message.
        kind: what it attaches to.
        owner: what it was given.
        batch_size: the batch size that it was given.
        named: arguments that are mappings or None.

    Raises:
        TrainingError: there are some.
    """
    it, instead = type(batch_size).__name__, f"write {call}"
    is_object = isinstance(batch_size, (kind, nn.Module, Optimizer, DataLoader))
    what = f"attach to a {type(owner).__name__}"
    refuse(
        (not isinstance(owner, kind), what, f"it is no {kind.__name__}", instead),
        (is_object, f"use a {it} as a batch size", "it is no number of samples", instead),
    )
    for name, value in named.items():
        is_other = value is not None and not isinstance(value, Mapping)
        refuse((is_other, f"use {name}={shown(value)}", "it has nothing by name", instead))


def warn_of_replaced(*, has_begun: bool) -> None:
    """Warn if `attach` replaces a run that has not begun, as when it is called twice."""
    if not has_begun:
        said = "attach() replaces the run that was attached before, which has not begun"
        warnings.warn(said, RuntimeWarning, stacklevel=3)


@final
class Probe:
    """Calls code of the user beside the run; an exception in it does not end the run.

    Args:
        name: what it calls.
    """

    is_open = False
    """Whether code is called `beside` the run at present."""

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None
        """The first exception."""
        self._name, self._is_told = name, False

    def __call__(self, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Return what a function returns; nan, which is true, if it raises."""
        try:
            return function(*given, **options)
        except Exception as error:  # noqa: BLE001  of the user's
            self.error = self.error or error
            return torch.tensor(math.nan)

    @contextmanager
    def beside(self, model: nn.Module, *others: Any) -> Iterator[None]:
        """While open, objects note nothing: their numbers, texts, lists and so on are restored.

        Args:
            model: whose modules and buffers are restored.
            others: further objects.
        """
        each = [vars(one) for one in (*others, *model.modules())]
        plain, containers = (bool, int, float, str, type(None)), (list, dict, set, deque)
        kept = [dict(own) for own in each]
        values = [one for own in each for one in own.values() if type(one) in containers]
        inner, self.is_open = [copy.copy(one) for one in values], True
        try:
            with kept_buffers(model):
                yield
        finally:
            self.is_open = False
            for own, before in zip(each, kept, strict=True):
                for key in own.keys() - before.keys():
                    del own[key]
                own.update({key: one for key, one in before.items() if isinstance(one, plain)})
            for one, items in zip(values, inner, strict=True):
                one.clear()
                (one.update if isinstance(one, (dict, set)) else one.extend)(items)

    def tell(self) -> None:
        """Warn once, after the first exception, of what is not checked."""
        if self.error is not None and not self._is_told:
            self._is_told = True
            said = f"cannot check what the loss is a mean over, since a trial of {self._name}"
            line = f"{said} raised {first_line(self.error)}; pass units= to say it"
            warnings.warn(line, RuntimeWarning, stacklevel=2)


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
        self.optimizer, self._timer = optimizer, timer
        groups = optimizer.param_groups
        self.base_lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]

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


class Pass(NamedTuple):
    """One forward and backward pass of a step."""

    batch: Any
    """The collated samples."""
    weight: float
    """The factor of its mean loss; 0 for a dummy."""
    is_first: bool
    """Whether a step begins with it."""
    is_last: bool
    """Whether the optimizer steps after it."""
    num_samples: int
    """0 for a dummy."""
    watch: AbstractContextManager[None]
    """Measures the backward pass inside, if the batch size policy reads the noise."""


@final
class StepMeter:
    """Measures the loss and the gradient noise of a step, if the batch size policy reads them.

    Each step, in this order:

    1. `passes(step)` returns what to compute. To measure noise, a step of one micro-batch on one
       rank is cut into two.
    2. Each backward pass runs in its `watch`.
    3. `signals()` returns what `Run.finish` takes. Call it before gradients are clipped.

    Args:
        run: the run, bound.
        model: the model that the loss is computed with, wrapped if it is (DDP, FSDP2).

    Raises:
        TrainingError: the policy reads the noise, and there is no model.
    """

    def __init__(self, run: Run, model: nn.Module | None) -> None:
        self._run, reads = run, run.loader.reads
        self._reads_loss = "loss" in reads
        self._noise: NoiseMeter | None = None
        self._spare: Any = None
        self._units: Units | None = None
        self.counter: UnitCounter = None
        """Counts the units of a batch in the present step; None: they are samples."""
        if "noise" in reads:
            refuse((model is None, "measure noise", "the model is not known", "pass model=model"))
            assert model is not None, "refused"
            self._noise = NoiseMeter.of(model, run.loader.spec, run.ranks)

    @property
    def averages_each(self) -> bool:
        """Whether ranks must average gradients in each pass, not only in the last (FSDP2)."""
        return self._noise is not None and self._noise.averages_each

    def passes(self, step: Step, units: Units | None = None) -> list[Pass]:
        """Begin a step; return its passes. All ranks must call it.

        Args:
            step: the step, whose micro-batches may be cut again.
            units: what the loss is a mean over; None: `loss_weight` of the run.

        Raises:
            TrainingError: the batch has no unit.
        """
        if self._noise is not None:
            step.micro_batches = list(self._noise.begin(step))
        ranks, last = self._run.loader.ranks, len(step) - 1
        if units != self._units or self.counter is None:
            self._units = units
            self.counter = self._run.loss_weights.count if units is None else unit_counter(units)
        counter = self.counter
        counts, total = units_of(step, counter, ranks)
        found: list[Pass] = []
        for number, (micro, count) in enumerate(zip(step, counts, strict=True)):
            weight, is_last = count * ranks.dp_world_size / total, number == last
            watch: AbstractContextManager[None] = nullcontext()
            if self._noise is not None:
                watch = self._noise.watch(micro, is_last=is_last, units=count, divisor=total)
            found.append(Pass(micro.batch, weight, not number, is_last, micro.num_samples, watch))
        # A mean over no units is nan, also with a weight of 0.
        used = next((one.batch for one in found if one.weight), self._spare)
        self._spare = None if counter is None else copied(used)
        is_replaced = self._spare is not None
        return [
            one._replace(batch=copied(self._spare)) if is_replaced and not one.weight else one
            for one in found
        ]

    def signals(self, loss: Tensor | float | None = None, scaler: Any = None) -> Signals:
        """Return what the step measured, from all ranks, which must all call it.

        Args:
            loss: this rank's loss of the step, times the number of ranks; None: not known.
            scaler: what multiplies the loss of fp16; None: nothing does.
        """
        scale = 1.0 if scaler is None else scaler.get_scale()
        found = NO_SIGNALS if self._noise is None else self._noise.signals(scale)
        if self._reads_loss and loss is not None:
            found = replace(found, loss=self._run.all_reduce(float(loss), "mean"))
        return found


def counted_as_collated(data: Any, **facts: Any) -> DataSpec:
    """Return a `DataSpec` in which a row of a batch need not be a sample.

    Packing makes one row of several samples, DPO two of each. So map-style samples are counted.
    """
    spec = DataSpec.of(data, **facts)
    if spec.is_map_style and spec.get_num_samples_in_batch is None:
        return DataSpec.of(spec, get_num_samples_in_batch=lambda _: None)
    return spec


def with_lengths(run: Run) -> Run:
    """Return a run; refuse amounts in tokens of samples of unknown length: nothing counts them.

    Raises:
        TrainingError: it has such amounts.
    """
    spec, micro = run.spec, checked_size(run.micro_batch_size or 1)
    is_in_tokens = run.prepared.bound_policy.unit is TimeUnit.TOKEN or isinstance(micro, Tokens)
    is_unknown = spec.is_map_style and spec.lengths is None and spec.tokens_per_sample is None
    why = "how many each sample has is not known"
    instead = "pass lengths=count_lengths(dataset, 'lengths.bin') to attach()"
    refuse((is_in_tokens and is_unknown, "follow amounts in tokens", why, instead))
    return run


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


def ends_epoch(run: Run) -> bool:
    """Return whether a run is at the end of an epoch, also if its last samples are dropped."""
    now, num_samples = run.timer.timestamp, run.horizon.dataset_num_samples
    if now.batch_in_epoch == 0 or num_samples is None:
        return now.batch_in_epoch == 0
    return steps_between(run, now.sample, (now.epoch + 1) * num_samples).most == 0


def is_over(run: Run) -> bool:
    """Return whether no step is left; a run notes dropped samples when it is asked for the next."""
    return run.is_done or (run.loading.last_batch == "drop" and steps_left(run).most == 0)


def note_metrics(run: Run, metrics: Mapping[str, Any]) -> None:
    """Give the run the metric of an evaluation that it follows; none before a fit.

    Raises:
        TrainingError: the evaluation measures other things.
    """
    followed = measured_value(one_metric(run.loader.reads), metrics) if run.is_bound else None
    if followed is not None:
        run.loader.note_metric(float(followed))


def warn_of_end(run: Run, framework: str, resume: str) -> None:
    """Warn if a framework ends a run before its own end, as early stopping does.

    Args:
        run: the run.
        framework: its name.
        resume: what continues the run.
    """
    if run.is_bound and not is_over(run):
        now, length = run.timer.get("sp"), run.horizon.max_duration
        said = (
            f"{framework} ended the run at {now}, before its end at {length}; resume it: {resume}"
        )
        warnings.warn(said, RuntimeWarning, stacklevel=2)


def has_random_order(dataloader: Any) -> bool:
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
    what = f"follow the order of a {type(sampler if is_plain else inner).__name__}"
    why, instead = "it may not be of single samples", "use a random or a sequential sampler"
    raise DataError.cannot(what, why=why, instead=instead)
