"""`prepare` and `Run`: a run that is bound once, for any training loop and for callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto._foreign import knows_foreign
from stretto.batching import NO_SIGNALS, PolicyLike, RuleLike, Signals
from stretto.batching.pack import checked_micro_batch
from stretto.batching.rows import LengthsLike
from stretto.batching.seesaw import Pair, paired
from stretto.data import DataSpec, Step, StepLoader
from stretto.data.mistakes import LoopMistakes
from stretto.data.spec import check_workers
from stretto.data.weights import LossWeights, MicroBatchView, UnitCounter, Units, unit_counter
from stretto.distributed.logged import Logged, Reduce
from stretto.distributed.mesh import Mesh, as_mesh
from stretto.distributed.strategy import Strategy
from stretto.errors import CheckpointError, PlanWarning, StrettoError, TrainingError
from stretto.optim import Hyperparameters
from stretto.optim.hyperparameters import (
    GroupValues,
    as_one_schedule,
    joined,
    read_base_values,
    set_base_values,
)
from stretto.planning import Plan, Prepared, bind_run
from stretto.planning.plan import plan_prepared
from stretto.planning.stages import mistakes_of, single_sample
from stretto.runtime.agreement import check_agreement, in_batch
from stretto.runtime.packing import PackingError, count, pack, unpack
from stretto.runtime.ranks import Ranks
from stretto.runtime.rewind import kept_buffers
from stretto.runtime.weights import WeightWatch
from stretto.schedules.fields import one_of
from stretto.schedules.names import check_value_names
from stretto.settings import Loading, Stepping, read_settings
from stretto.timing import BoundTrigger, Horizon, TimeLike, Timer, Timestamp, Trigger
from stretto.timing.timestamp import NANOSECONDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_VERSION = 1
_NOTHING: frozenset[str] = frozenset()
_NAN = float("nan")
BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
"""Layers that normalize by the statistics of a micro-batch."""
MOST_IN_A_ROW = 20
"""Skipped steps in a row after which the run ends with an error."""


_T = TypeVar("_T", float, Tensor)


@knows_foreign
def prepare(
    data: Any,
    batch_size: PolicyLike | Pair,
    *,
    max_duration: TimeLike,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    schedules: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    rule: RuleLike | None = None,
    every: Mapping[str, Trigger | TimeLike] | None = None,
    micro_batch_size: int | str | None = None,
    loading: Loading | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    callbacks: Sequence[object] = (),
    folder: str | Path | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    idle_ranks: bool = False,
    sequence_length: LengthsLike | None = None,
    loss_weight: Units = "samples",
    shifts_labels: bool | None = None,
) -> Run:
    """Prepare a run for a training loop of your own.

    Everything is checked and bound here. Iterate over the run for its steps, and call `finish`
    after each optimizer step.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(12, 1))
    >>> run = prepare(
    ...     data, "0sp:2 4sp:4", max_duration="1ep", optimizer=optimizer,
    ...     schedules={"lr": 1.0}, every={"evaluate": "50%"},
    ... )
    >>> for step in run:
    ...     for micro in step:
    ...         (micro.weight * model(micro.batch[0]).square().mean()).backward()
    ...     optimizer.step(); optimizer.zero_grad()
    ...     if "evaluate" in run.finish():
    ...         print(run.timer.get("sp"))
    8sp
    12sp
    >>> run.timer.batch, run.prepared.num_batches
    (4, 4)

    Args:
        data: what `StepLoader` takes.
        batch_size: samples of one step over all ranks: a number, a text, a policy, or a pair such
            as `Seesaw`, which also sets the schedule of the learning rate.
        max_duration: how long the run is.
        optimizer: one or several; None: call `bind` before the first step.
        schedules: by hyper-parameter, a schedule or several that multiply.
        values: numbers of your own on the clock, such as the weight of a loss: by name, a schedule
            or several that multiply. `step.values` has them for each step.
        rule: how learning rates, or values by name, follow the batch size.
        every: by a name of yours, when `finish` returns that name.
        micro_batch_size: the most samples of one micro-batch, or the most tokens, such as
            `"8Ktok"`; None: a rank's whole share.
        loading: how samples are ordered and fetched: a `Loading`, or a mapping of its fields.
        model: the model, for callbacks; dummies then leave its buffers alone.
        callbacks: the callbacks of the run, for each other.
        folder: the run folder, for callbacks.
        mesh: as in `Trainer`: the mesh of all ranks if they share the model, too.
        idle_ranks: as in `Trainer`: whether a batch may have fewer samples than there are ranks.
        sequence_length: tokens of a sequence, which may change: `"0tok:4096 252Mtok:8192"`. For
            map-style data of equal samples: consecutive ones are joined to rows of that length,
            so they must follow each other in the text without a gap.
            Each length is a multiple of the shorter ones and of `DataSpec.tokens_per_sample`.
        loss_weight: what your loss is a mean over: `"samples"`, target `"tokens"`, or what a
            function counts in a batch. The weights of micro-batches follow it, so that gradients
            summed over them and averaged over ranks are those of the mean over the whole batch.
        shifts_labels: see `Stepping.shifts_labels`.

    Raises:
        StrettoError: the arguments do not fit; the message says what to write instead.
    """
    loading = Loading() if loading is None else read_settings(Loading, loading, "loading")
    schedules = {} if schedules is None else schedules
    values = {} if values is None else values
    stepping = Stepping(loss_weight=loss_weight, shifts_labels=shifts_labels)  # checks them
    spec = DataSpec.of(data)
    sizes, read, rule = paired(batch_size, schedules, rule)
    prepared = bind_run(
        spec.horizon(max_duration, loading=loading),
        sizes,
        schedules={name: as_one_schedule(one) for name, one in read.items()},
        values={name: as_one_schedule(one) for name, one in values.items()},
        triggers=every,
        rule=rule,
        sequence_length=sequence_length,
    )
    run = Run(
        spec,
        prepared,
        loading,
        micro_batch_size=micro_batch_size,
        model=model,
        callbacks=callbacks,
        folder=None if folder is None else Path(folder),
        mesh=as_mesh(mesh),
        idle_ranks=idle_ranks,
        count=unit_counter(stepping.loss_weight, shifts_labels=stepping.shifts_labels),
    )
    if optimizer is not None:
        run.bind(optimizer)
        run.own_loop = LoopMistakes(run.optimizers, model) if run.optimizers else None
    return run


@final
class Run:
    """A run: its steps, its clock, what is scheduled and what is due; and the ranks and metrics.

    The trainer, the adapters and loops of your own use it alike, and callbacks get it. `prepare`
    makes one. A loop iterates over it, or calls `begin` and `finish` for each step; `steps` and
    `micro_batches` are iterators over one epoch.

    >>> run = prepare(range(8), "0sp:2 4sp:4", max_duration="1ep")
    >>> run.prepared.num_batches, run.is_bound
    (3, False)
    """

    refused: StrettoError | None = None
    """Why the run cannot begin, so that it has no plan; for the loop."""
    _weights: WeightWatch | None = None
    _look_at = 0
    """The number of batches at which weights are looked at next."""

    def __init__(
        self,
        spec: DataSpec,
        prepared: Prepared,
        loading: Loading,
        *,
        micro_batch_size: int | str | None = None,
        model: nn.Module | None = None,
        callbacks: Sequence[object] = (),
        folder: Path | None = None,
        mesh: Mesh | None = None,
        idle_ranks: bool = False,
        count: UnitCounter = None,
    ) -> None:
        check_workers(spec, loading.num_workers)
        self.spec = spec
        self.prepared = self._from_start = prepared
        self.loading = loading
        self.micro_batch_size = checked_micro_batch(micro_batch_size, prepared.facts)
        self.horizon: Horizon = prepared.horizon
        """The static facts of the run: its length, and the size of an epoch."""
        self.callbacks = tuple(callbacks)
        self.folder = folder
        """The run folder; None: there is none."""
        self.optimizers: tuple[Optimizer, ...] = ()
        self.step: Step | None = None
        """The current step, until the next one; None before the first."""
        self.is_open = False
        """Whether the step was drawn by `begin` and is not finished."""
        self.batch_size = 0
        """The size that was decided for the last step that was drawn."""
        self.mistakes: tuple[str, ...] = ()
        """What is probably a mistake; each was warned of with a `PlanWarning`."""
        self.due: frozenset[str] = _NOTHING
        """What `finish` returned last."""
        self.stop_reason: str | None = None
        """Why the run stops after this batch, or has stopped; None: it continues."""
        self.ended: str | None = None
        """Why the run has ended before its length; then one that resumes trains no more."""
        self.logged_units = 0.0
        """Number of samples, or target tokens, of the loss in the last line of metrics."""
        self.skipped = SkippedSteps()
        """Counts skipped steps; for the loop."""
        self.logged = Logged()
        """Values logged since the last line of metrics; for the loop."""
        self.latest_loss: float | Tensor | Callable[[], float] = _NAN
        """What `loss` reads; for the loop."""
        self.idle_ranks, self._mesh, self._model = idle_ranks, mesh, model
        self.loss_weights = LossWeights(count)
        self._base: list[list[GroupValues]] | None = None
        self._loader: StepLoader | None = None
        self._hyperparameters: Hyperparameters | None = None
        self._scheduled: Hyperparameters | None = None
        """The same; None if the run leaves them alone."""
        self._plan: Plan | None = None
        self._state: Mapping[str, Any] | None = None
        self.own_loop: LoopMistakes | None = None
        """Looks at the first steps of a loop of your own; None: at no other loop."""
        self._evaluate: Callable[[], dict[str, float]] | None = None
        self._triggers: dict[str, BoundTrigger] = dict(prepared.bound_triggers)
        self._seen = Timestamp()
        """The clock when triggers were looked at last."""
        self._limits: list[tuple[Callable[[Timestamp], int], int]] = []
        """Counters, and the tick of each at which something may be due."""

    @knows_foreign
    def bind(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch_size: int | str | None = None,
        base: Mapping[str, float] | None = None,
        strategy: Strategy | None = None,
    ) -> Self:
        """Start the run from its beginning, on these ranks and with these optimizers.

        Call it before the state of the optimizers is loaded. The first call reads the base values
        of what is scheduled. A later one (a retry, a second `fit`) writes them back.

        Args:
            optimizers: one or several; an empty list reads the data alone.
            rank: this process among those that share each batch; None: torch.distributed's.
            world_size: how many processes share each batch; None: torch.distributed's.
            micro_batch_size: replaces that of `prepare`; None: keep it.
            base: base values by name (`"lr"`, `"lr@head"`), for optimizers that a schedule has
                changed already; None: `initial_lr` of each group, or else its present values.
            strategy: which ranks share each batch, for the trainer.

        Raises:
            StrettoError: the data, the schedules or the base values do not fit.
        """
        each = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if self._base is None or base is not None:
            self._base = [read_base_values(one, base or {}) for one in each]
        for one, values in zip(each, self._base, strict=True):
            set_base_values(one, values, self.prepared.schedules)
        if micro_batch_size is not None:
            self.micro_batch_size = checked_micro_batch(micro_batch_size, self.prepared.facts)
        ranks = Ranks.of(rank, world_size) if strategy is None else strategy.ranks
        if strategy is None and rank is None and self._mesh is not None:
            self._mesh.tell(ranks)
        self.prepared, self.horizon = self._from_start, self._from_start.horizon
        self._is_shared, self._is_checked = ranks.dp_world_size > 1, strategy is not None
        self._loader = StepLoader(
            self.spec,
            self.prepared,
            micro_batch_size=self.micro_batch_size,
            loading=self.loading,
            ranks=ranks,
            idle_ranks=self.idle_ranks,
        )
        self.optimizers = tuple(each)
        if ranks.are_all_dp:  # of others, each may have a part of the model
            self._loader.also_described = self._optimizer_settings
        groups = [group for one in each for group in one.param_groups]
        self._num_groups = len(groups)
        check_value_names(self.prepared.values, {key for group in groups for key in group})
        self._hyperparameters = Hyperparameters(
            joined(each),
            self.prepared.schedules,
            self.horizon,
            rule=self.prepared.rules,
            bound=self.prepared.bound_schedules,
            measured=self._loader.measured,
        )
        # A trainer sets the learning rate even if nothing moves it: else a resumed run would keep
        # the saved rate, not the one that its optimizer is built with.
        is_set = self.is_scheduled or strategy is not None
        self._scheduled = self._hyperparameters if is_set else None
        self._warn()
        self._start()
        state, self._state = self._state, None
        if state is not None:
            self.load_state_dict(state)
        return self

    def _optimizer_settings(self) -> dict[str, Any]:
        """Return the plain values that optimizers were built with, by name."""
        groups = [(one.defaults, group) for one in self.optimizers for group in one.param_groups]
        return {
            f"{key} of parameter group {number} of {len(groups)}": value
            for number, (defaults, group) in enumerate(groups)
            for key, value in group.items()
            if key in defaults and isinstance(value, (bool, int, float, str))
        }

    def _watch_weights(self) -> WeightWatch:
        """Begin to look at the weights, before the first step."""
        ranks = self.loader.ranks
        found = WeightWatch(
            self.optimizers,
            self.timer.timestamp,
            # A trainer looks at each step.
            None if self._is_checked or not (ranks.can_compare and ranks.are_all_dp) else ranks,
            checks_finite=not self._is_checked,
        )
        self._look_at = found.next
        return found

    def _look_at_weights(self, after: Timestamp) -> None:
        """Look whether weights are trained, and whether the ranks are at the same place."""
        watch, ranks = self._weights, self.loader.ranks
        assert watch is not None, "made by begin"
        if ranks.can_compare and not self._is_checked:
            now = {"batch size": self.batch_size, "number of samples": after.sample}
            values = now | self.hyperparameters.values() | dict(self.values)
            check_agreement(in_batch(after.batch, values), ranks, call="the same step")
        last = self.prepared.num_batches
        watch.look(after, is_last=after.batch == last)
        self._look_at = watch.next if last is None else min(watch.next, last)

    def _warn(self) -> None:
        """Warn once of what is probably a mistake."""
        sizes, micro = self.prepared.sizes, self.micro_batch_size
        stages = sizes.stages if sizes is not None and self.prepared.is_quick else ()
        # A schedule that does not fit these sizes may fit those of a run that is resumed.
        is_read = self.is_scheduled and self.prepared.refused is None
        bound = self.hyperparameters.bound if is_read else {}
        lines = [*mistakes_of(self.prepared.facts, sizes, stages, bound)]
        modules = () if self._model is None else self._model.modules()
        norm = next((one for one in modules if isinstance(one, BATCH_NORMS)), None)
        if norm is not None and not isinstance(norm, nn.SyncBatchNorm):
            size = single_sample(stages, self.world_size, micro)
            if size is not None:
                lines.append(
                    f"a micro-batch of one sample (of a batch of {size}) meets "
                    f"{type(norm).__name__}, which takes its statistics from it; write "
                    "last_batch='drop' or 'carry', or other sizes"
                )
        lines += self._untrained()
        for line in lines:
            if line not in self.mistakes and self.is_first_rank:
                warnings.warn(line, PlanWarning, stacklevel=2)
        self.mistakes = tuple(lines)

    def _untrained(self) -> Iterator[str]:
        """Yield what says that weights are not trained."""
        groups = [group for one in self.optimizers for group in one.param_groups]
        if self.is_scheduled and groups and not any(group.get("lr", 1) for group in groups):
            yield (
                "the learning rate of the optimizer is 0, and schedules are factors of it; write "
                "the highest one there, such as lr=1e-3"
            )
        own = {id(one) for group in groups for one in group["params"]}
        named = [] if self._model is None else [*self._model.named_parameters()]
        left = [name for name, one in named if one.requires_grad and id(one) not in own]
        if left and any(id(one) in own for _, one in named):
            yield (
                f"no optimizer has {', '.join(left[:3])}{' ...' if len(left) > 3 else ''} of the "
                "model; build the optimizer of all parameters, or call requires_grad_(False) on "
                "those that are not trained"
            )

    def _start(self) -> None:
        """Begin at the present clock."""
        self._values = self.prepared.bound_values
        self.step, self.is_open, self.due, self._plan = None, False, _NOTHING, None
        self._weights = None
        self._look(self.timer.timestamp)

    @property
    def is_scheduled(self) -> bool:
        """Whether the run sets learning rates or other values; if not, it leaves them alone."""
        return bool(self.prepared.schedules)

    @property
    def is_bound(self) -> bool:
        """Whether `bind` was called."""
        return self._loader is not None

    @property
    def loader(self) -> StepLoader:
        """The loader; `bind` makes it."""
        if self._loader is None:
            raise _missing("draw steps", "the run has no optimizers", "bind(optimizers)")
        return self._loader

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The base values, the schedules and the learning rate rule; `bind` makes them."""
        if self._hyperparameters is None:
            raise _missing("read the schedules", "the run has no optimizers", "bind(optimizers)")
        return self._hyperparameters

    @property
    def values(self) -> Mapping[str, float]:
        """The values of your own in the current step; before the first, at the present clock."""
        if self.step is not None:
            return self.step.values
        now = self.timer.timestamp
        return {name: at(now) for name, at in self._values.items()}

    @property
    def model(self) -> nn.Module:
        """The model itself, neither compiled nor wrapped.

        Raises:
            TrainingError: `prepare` did not get it.
        """
        if self._model is None:
            raise _missing(
                "read the model", "the run does not have it", "prepare(..., model=model)"
            )
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @property
    def timer(self) -> Timer:
        """The clock."""
        return self.loader.timer

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None if the sizes are decided during the run.

        `why_not_planned` says why. Before `bind`, base values are 1.

        Raises:
            PlanError: a stage that is still to come has fewer samples than there are ranks.
        """
        if self.refused is not None:
            return None
        if self._plan is None and self.prepared.sizes is not None:
            known: dict[str, Any] = {"world_size": Ranks.of().dp_world_size}
            if self._loader is not None:
                known = {
                    "world_size": self.world_size,
                    "values": self.hyperparameters.bound,
                    "rules": self.hyperparameters.rules,
                    "base": self.hyperparameters.base,
                    "tracks_tokens": self.loader.tracks_tokens,
                    "resume_at": self.timer.timestamp,
                }
            self._plan = plan_prepared(
                self.prepared,
                micro_batch_size=self.micro_batch_size,
                idle_ranks=self.idle_ranks,
                **known,
            )
        return self._plan

    @property
    def why_not_planned(self) -> str | None:
        """Why `plan` is None; None if there is one."""
        refusal = self.refused or self.prepared.refusal
        return None if refusal is None else refusal.message.why

    def set_micro_batch_size(self, size: int | str) -> None:
        """Cut later batches into micro-batches of at most `size` samples, or so many tokens."""
        self.loader.set_micro_batch_size(size)
        self.micro_batch_size, self._plan = self.loader.micro_batch_size, None

    def begin(self) -> Step | None:
        """Draw the next step and set everything that is scheduled; None: the run is over.

        Raises:
            TrainingError: the last step is not finished.
        """
        if self.is_open:
            assert self.step is not None, "open"
            raise TrainingError.cannot(
                f"draw a step while the one at {self.step.timestamp.get('sp')} is open",
                why="the framework fetches batches ahead, or the loop did not finish the step",
                instead="turn prefetching off, and call finish() after each optimizer step",
            )
        # Not `or`: asking whether a loader is true is a call.
        loader = self.loader if self._loader is None else self._loader
        step = next(loader, None)
        if step is None:
            if self._weights is not None:
                self._weights.look(self.timer.timestamp, is_last=True)
                self._weights = None
        else:
            if self._weights is None:
                self._weights = self._watch_weights()
            self.step, self.is_open, self.batch_size = step, True, step.batch_size
            self.latest_loss = _NAN
            if self._values:
                step.values = {name: at(step.timestamp) for name, at in self._values.items()}
            counts_units = self.loss_weights.count is not None
            if counts_units:
                self.loss_weights.set(step, loader.ranks)
            may_be_dummy = self._is_shared or counts_units
            if (
                may_be_dummy
                and self._model is not None
                and not all(micro.weight for micro in step.micro_batches)
            ):
                step.around_dummy = partial(kept_buffers, self.model)
            loop, scheduled = self.own_loop, self._scheduled
            row = None if scheduled is None else scheduled.row
            if loop is not None:
                loop.check_values(row)
            if scheduled is not None:
                if len(scheduled.optimizer.param_groups) != self._num_groups:
                    self._follow_groups(scheduled)
                scheduled.apply(step.timestamp, step.batch_size)
            if loop is not None:
                loop.begin(step, row)
        return step

    def finish(
        self,
        signals: Signals = NO_SIGNALS,
        *,
        step: Step | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> frozenset[str]:
        """Count the open step; return the names of what is due after it.

        Without an open step, it returns the same names again. All ranks must call it.

        Args:
            signals: what the step measured, for the policy; the same on all ranks.
            step: the step, or a copy of it, to check that it is the last one.
            tokens: as in `StepLoader.finish`.
            seconds: as in `StepLoader.finish`.

        Raises:
            TrainingError: `step` is another one.
        """
        if step is not None and (self.step is None or step.timestamp != self.step.timestamp):
            raise TrainingError.cannot(
                f"finish the step at {step.timestamp.get('sp')}",
                why="another step was drawn after it",
                instead="finish each step before the next one is drawn",
            )
        if not self.is_open:
            return self.due
        self.is_open, self.due = False, _NOTHING
        assert self._loader is not None, "a step is open"
        after = self._loader.finish(tokens=tokens, seconds=seconds, signals=signals)
        if self.own_loop is not None:
            row = None if self._scheduled is None else self._scheduled.row
            self.own_loop.finish(row, is_done=self.horizon.is_done(after))
        if after.batch >= self._look_at:
            self._look_at_weights(after)
        for read, tick in self._limits:
            if read(after) >= tick:
                before, each = self._seen, self._triggers.items()
                self.due = frozenset([name for name, is_due in each if is_due(before, after)])
                self._look(after)
                break
        return self.due

    def _follow_groups(self, scheduled: Hyperparameters) -> None:
        """Schedule the parameter groups that were added since, from their present values."""
        if self._is_checked:
            raise TrainingError.cannot(
                "train parameter groups that were added during the run",
                why="a Trainer clips, checks and saves the groups that it was built with",
                instead="give the optimizer all of them, and call requires_grad_(False) on those "
                "that wait",
            )
        scheduled.follow(self.horizon, self.prepared.bound_schedules)
        self._num_groups = len(scheduled.optimizer.param_groups)
        self._base = [read_base_values(one, {}) for one in self.optimizers]

    def take_back(self) -> None:
        """Yield the open step once more: it could not be run."""
        self.loader.take_back()
        self.is_open = False

    def watch(self, name: str, trigger: BoundTrigger) -> None:
        """Have `finish` return one more name, which the plan does not show."""
        self._triggers[name] = trigger
        self._look(self._seen)

    def _look(self, now: Timestamp) -> None:
        """Note the counters at which something is due next; steps before need not look."""
        limits: dict[Callable[[Timestamp], int], int] = {}
        for trigger in self._triggers.values():
            for axis, tick in trigger.next(now):
                limits[axis.read] = min(tick, limits.get(axis.read, tick))
        self._seen, self._limits = now, list(limits.items())

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps of the rest of the run. Call `finish` after each."""
        while (step := self.begin()) is not None:
            yield step

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the present epoch. Call `finish` after each.

        A step that is open when this is called comes first, anew.

        Raises:
            TrainingError: a step is asked for before the last one was finished.
        """
        epoch, step = self.timer.epoch, self.step if self.is_open else None
        while step is not None or self.timer.epoch == epoch:
            step = self.begin() if step is None else step
            if step is None or step.timestamp.epoch != epoch:
                return  # where an epoch ends may be known only when the next one has begun
            yield step
            step = None

    def micro_batches(self) -> Iterator[MicroBatchView]:
        """Yield the micro-batches of the present epoch; call `finish` after each last one.

        Raises:
            TrainingError: a step is asked for before the last one was finished.
        """
        for step in self.steps():
            last = len(step) - 1
            for number, micro in enumerate(step):
                yield MicroBatchView(micro.batch, micro.weight, number == 0, number == last)

    @property
    def is_done(self) -> bool:
        """Whether the run is over."""
        return self.horizon.is_done(self.timer.timestamp)

    def clock(self, timestamp: Timestamp | None = None) -> dict[str, float]:
        """Return the clock in every unit, as each line of metrics has it; None: now."""
        now = self.timer.timestamp if timestamp is None else timestamp
        num_samples = self.horizon.dataset_num_samples
        return {
            "ep": now.sample / num_samples if num_samples else now.epoch,
            "ba": now.batch,
            "sp": now.sample,
            "tok": now.token,
            "dur": self.horizon.elapsed(now),
            "sec": now.run_nanoseconds / NANOSECONDS,
        }

    def log_values(self) -> dict[str, float]:
        """Return values for a log line: the clock, the batch size and what is scheduled."""
        scheduled = self.hyperparameters.values() | dict(self.values)
        scheduled |= self.loader.log_values()
        return self.clock() | {"batch_size": self.batch_size} | scheduled

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON. It changes nothing.

        `open` says whether a step was drawn and not finished; after a resume, it comes anew.

        Raises:
            TrainingError: an optimizer has stepped since, so the step would be trained twice.
        """
        if self.is_open and self.own_loop is not None and any(self.own_loop.updates):
            assert self.step is not None, "open"
            raise TrainingError.cannot(
                f"save the state in the step at {self.step.timestamp.get('sp')}",
                why="the optimizer has stepped, and after a resume the step would come again",
                instead="call finish() first, then state_dict()",
            )
        loader = self.loader.state_dict(again=True)
        return {"version": _VERSION, "open": self.is_open, "loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state_dict` was called; with other ranks and micro-batches, too.

        Before `bind`, the state waits for it.

        Raises:
            CheckpointError: it was saved from other data, or it is damaged.
        """
        if state.get("version") != _VERSION or "loader" not in state:
            raise CheckpointError.cannot(
                f"go on with a run of version {state.get('version')!r}",
                why=f"this version of stretto reads version {_VERSION}",
                instead="pass what Run.state_dict() returned",
            )
        if self._loader is None:
            self._state = state
            return
        self.load_loader(state["loader"])

    def load_loader(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of the loader, for the trainer."""
        self.loader.load_state_dict(state)
        self.prepared, self.horizon = self.loader.prepared, self.loader.prepared.horizon
        self.hyperparameters.follow(self.horizon, self.prepared.bound_schedules)
        self._start()

    @property
    def rank(self) -> int:
        """The number of this process among those that share each batch."""
        return self.loader.rank

    @property
    def world_size(self) -> int:
        """The number of processes that share each batch."""
        return self.loader.world_size

    @property
    def ranks(self) -> Ranks:
        """The processes of the run. If they were not given, all of them must ask for it."""
        return self.loader.ranks.join()

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the first of all ranks, which writes and prints."""
        return self.loader.ranks.is_first

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

    def set_loss(self, loss: float | Tensor | Callable[[], float]) -> None:
        """Set the loss of the step, or a function that reads it, for callbacks."""
        # Avoid `isinstance(loss, Tensor)`, which is slow because torch overrides it.
        self.latest_loss = loss if callable(loss) or isinstance(loss, float) else loss.detach()

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
        return self.logged.take(self.ranks)

    def all_reduce(self, value: _T, reduce: Literal["sum", "mean", "max", "min"] = "sum") -> _T:
        """Return a number, or a tensor element by element, reduced over all ranks.

        Every rank must call it, with a tensor of the same shape and type on its device. Ranks that
        share a model count once in a sum or mean.

        Raises:
            TrainingError: there is no such reduction, or another rank has ended.
        """
        one_of(reduce, "reduce", ("sum", "mean", "max", "min"), TrainingError)
        operation = "sum" if reduce == "mean" else reduce
        divisor = self.world_size if reduce == "mean" else 1
        is_left_out = operation == "sum" and not self.ranks.is_loss_rank
        if isinstance(value, Tensor):
            total = value.detach().clone()
            if is_left_out:
                total.zero_()
            self.ranks.reduce(total, operation)
            return total / divisor if divisor > 1 else total
        packed = torch.tensor([0.0 if is_left_out else value], dtype=torch.float64)
        self.ranks.reduce(packed, operation)
        return float(packed.item()) / divisor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on every rank.

        Every rank must call it. Nothing is pickled: values may contain the types that
        `Callback.state_dict` allows.

        Raises:
            TrainingError: a value has another type, or another rank has ended.
        """
        packed = self.ranks.gather(_packed(value), call="run.gather()")
        return [unpack(one) for one in packed]

    def broadcast(self, value: Any = None) -> Any:
        """Return the first rank's value on every rank. Every rank must call it.

        Raises:
            TrainingError: the value has a type that `gather` refuses, or another rank has ended.
        """
        packed = _packed(value if self.ranks.is_first else None)
        return unpack(self.ranks.gather(packed, call="run.broadcast()")[0])

    def barrier(self) -> None:
        """Wait until every rank has called it.

        Raises:
            TrainingError: another rank has ended, or the time limit has passed.
        """
        self.ranks.gather("", call="run.barrier()")

    def stop(self, reason: str, *, is_final: bool = True) -> None:
        """Stop the run after the current batch.

        In `on_fit_start`, it stops before the first batch. The first reason counts. On several
        ranks, one call is enough; they learn of it in the next batch, which is then the last.

        Args:
            reason: why.
            is_final: whether the run has ended, so that it trains no more when it is resumed
                (unless `fit(even_if_stopped=True)` says so). False: it is interrupted, as by a
                signal, for example because the time of a job is over.
        """
        if self.stop_reason is None:
            self.stop_reason = reason
        if is_final and self.ended is None:
            self.ended = reason

    def evaluate(self) -> dict[str, float]:
        """Run all evaluations, log the metrics and return them by `name/metric`.

        Every rank must call it.

        Raises:
            TrainingError: the loop has no evaluations.
        """
        if self._evaluate is None:
            raise _missing("evaluate", "the loop has no evaluations", "evaluate_with(function)")
        return self._evaluate()

    def evaluate_with(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Set the function that `evaluate` calls; for the loop."""
        self._evaluate = evaluate


@final
class SkippedSteps:
    """Counts skipped steps.

    >>> skipped = SkippedSteps()
    >>> skipped.add(Timestamp())
    >>> skipped.count
    1
    """

    def __init__(self) -> None:
        self.count = 0
        self.in_a_row = 0
        """Those since the last step that was not skipped."""

    def add(self, at: Timestamp) -> None:
        """Count the step that begins at `at`.

        Raises:
            TrainingError: too many steps in a row were skipped.
        """
        self.count += 1
        self.in_a_row += 1
        if self.in_a_row >= MOST_IN_A_ROW:
            self.in_a_row = 0
            raise TrainingError.cannot(
                f"continue after {at.get('sp')}",
                why=f"{MOST_IN_A_ROW} steps in a row were not finite",
                instead="resume from an earlier checkpoint with a lower learning rate",
            )

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"count": self.count, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counts."""
        self.count, self.in_a_row = count(state, "count"), count(state, "in_a_row")


def _missing(what: str, why: str, call: str) -> TrainingError:
    return TrainingError.cannot(what, why=why, instead=f"call {call} first")


def _packed(value: Any) -> Any:
    try:
        return pack(value)
    except PackingError as error:
        raise TrainingError.cannot(
            f"send a {type(value).__name__} to other ranks",
            why=str(error),
            instead="pass numbers, texts, bytes, tensors, and lists, tuples and dicts of them",
        ) from None
