"""`ExternalRun`: a run inside a training loop that is not stretto's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Self, final

from torch import nn
from torch.optim import Optimizer

from stretto.batching import NO_SIGNALS, NoRule, Signals
from stretto.data import DataSpec, Step, StepLoader
from stretto.errors import CheckpointError, TrainingError
from stretto.integrations import counts
from stretto.integrations.base_values import GroupValues, read_base_values, set_base_values
from stretto.integrations.counts import Count
from stretto.integrations.meter import StepMeter
from stretto.integrations.scheduler import ClockScheduler
from stretto.integrations.weights import MicroBatchView, Units, weights_of
from stretto.optim import Hyperparameters
from stretto.optim.joined import joined
from stretto.planning import Plan, Prepared
from stretto.planning.plan import plan_prepared
from stretto.settings import Loading
from stretto.timing import Timer, Timestamp

_VERSION = 1


@final
class ExternalRun:
    """A run inside a loop that is not stretto's: its steps, its clock, and what it schedules.

    Made by `prepare`. A loop calls `bind` once, then `begin` and `finish` for each step; `steps`
    and `micro_batches` are iterators over one epoch that call `begin`.
    """

    def __init__(
        self, spec: DataSpec, prepared: Prepared, loading: Loading, micro_batch_size: int | None
    ) -> None:
        self.spec = spec
        self.prepared = prepared
        self.loading = loading
        self.micro_batch_size = micro_batch_size
        self.horizon = prepared.horizon
        self.step: Step | None = None
        """The open step: drawn by `begin` and not finished."""
        self.due: frozenset[str] = frozenset()
        """What `finish` returned last."""
        self._base: list[list[GroupValues]] | None = None
        self._loader: StepLoader | None = None
        self._hyperparameters: Hyperparameters | None = None
        self._state: Mapping[str, Any] | None = None
        self._seen = self._finished = Timestamp()
        self.batch_size = 0
        """The size that was decided for the last step that was drawn."""

    def bind(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch_size: int | None = None,
        base: Mapping[str, float] | None = None,
    ) -> Self:
        """Start the run from its beginning, on these ranks and with these optimizers.

        Call it before the state of the optimizers is loaded. The first call reads the base values
        of what is scheduled. A later one (a retry, a second `fit`) writes them back.

        Args:
            optimizers: one or several.
            rank: this process among those that share each batch; None: torch.distributed's.
            world_size: how many processes share each batch; None: torch.distributed's.
            micro_batch_size: replaces that of `prepare`; None: keep it.
            base: base values by name (`"lr"`, `"lr@head"`), for optimizers that a schedule has
                changed already; None: `initial_lr` of each group, or else its present values.

        Raises:
            StrettoError: the data, the schedules or the base values do not fit.
        """
        each = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if self._base is None or base is not None:
            self._base = [read_base_values(one, base or {}) for one in each]
        for one, values in zip(each, self._base, strict=True):
            set_base_values(one, values, self.prepared.schedules)
        if micro_batch_size is not None:
            self.micro_batch_size = micro_batch_size
        settings = {one.name: getattr(self.loading, one.name) for one in fields(Loading)}
        del settings["last_batch"]
        self._loader = StepLoader(
            self.spec,
            self.prepared,
            micro_batch_size=self.micro_batch_size,
            rank=rank,
            world_size=world_size,
            **settings,
        )
        self._hyperparameters = Hyperparameters(
            joined(each),
            self.prepared.schedules,
            self.horizon,
            rule=self.prepared.rule,
            bound=self.prepared.bound_schedules,
        )
        self.step, self.due = None, frozenset()
        self._seen = self._finished = self.timer.timestamp
        state, self._state = self._state, None
        if state is not None:
            self.load_state_dict(state)
        return self

    @property
    def is_scheduled(self) -> bool:
        """Whether the run sets learning rates or other values; if not, it leaves them alone."""
        return bool(self.prepared.schedules) or not isinstance(self.prepared.rule, NoRule)

    @property
    def is_bound(self) -> bool:
        """Whether `bind` was called."""
        return self._loader is not None

    @property
    def loader(self) -> StepLoader:
        """The loader; `bind` makes it."""
        if self._loader is None:
            raise _unbound()
        return self._loader

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The base values and schedules of all optimizers."""
        if self._hyperparameters is None:
            raise _unbound()
        return self._hyperparameters

    @property
    def timer(self) -> Timer:
        """The clock."""
        return self.loader.timer

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None if the sizes are decided during the run."""
        if self.prepared.sizes is None:
            return None
        return plan_prepared(
            self.prepared,
            world_size=self.loader.world_size,
            micro_batch_size=self.loader.micro_batch_size,
            values=self.hyperparameters.bound,
            base=self.hyperparameters.base,
            tracks_tokens=self.loader.tracks_tokens,
            resume_at=self.timer.timestamp,
        )

    def begin(self) -> Step | None:
        """Draw the next step and set everything that is scheduled; None: the run is over.

        Raises:
            TrainingError: the last step is not finished.
        """
        if self.step is not None:
            raise TrainingError.cannot(
                f"draw a step while the one at {self.step.timestamp.get('sp')} is open",
                why="the framework fetches batches ahead, or the loop did not finish the step",
                instead="turn prefetching off, and call finish() after each optimizer step",
            )
        step = next(self.loader, None)
        if step is not None:
            self.step, self.batch_size = step, step.batch_size
            if self.is_scheduled:
                self.hyperparameters.apply(step.timestamp, step.batch_size)
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
            step: the step, or a copy of it, to check that it is the open one.
            tokens: as in `StepLoader.finish`.
            seconds: as in `StepLoader.finish`.

        Raises:
            TrainingError: `step` is another one.
        """
        latest = self._finished if self.step is None else self.step.timestamp
        if step is not None and step.timestamp != latest:
            raise TrainingError.cannot(
                f"finish the step at {step.timestamp.get('sp')}",
                why="another step was drawn after it",
                instead="finish each step before the next one is drawn",
            )
        if self.step is None:
            return self.due
        self._finished, self.step, before = self.step.timestamp, None, self._seen
        self._seen = self.loader.finish(tokens=tokens, seconds=seconds, signals=signals)
        triggers = self.prepared.bound_triggers.items()
        self.due = frozenset([name for name, is_due in triggers if is_due(before, self._seen)])
        return self.due

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the present epoch. Call `finish` after each.

        A step that is open when this is called comes first, anew.

        Raises:
            TrainingError: a step is asked for before the last one was finished.
        """
        epoch, step = self.timer.epoch, self.step
        while step is not None or self.timer.epoch == epoch:
            step = self.begin() if step is None else step
            if step is None or step.timestamp.epoch != epoch:
                return  # where an epoch ends may be known only when the next one has begun
            yield step
            step = None

    def micro_batches(self, units: Units = "samples") -> Iterator[MicroBatchView]:
        """Yield the micro-batches of the present epoch; call `finish` after each last one.

        Raises:
            TrainingError: a step is asked for before the last one was finished.
        """
        for step in self.steps():
            last = len(step) - 1
            pairs = zip(step, self.weights(step, units), strict=True)
            for number, (micro, weight) in enumerate(pairs):
                yield MicroBatchView(micro.batch, weight, number == 0, number == last)

    def weights(self, step: Step, units: Units = "samples") -> list[float]:
        """Return the factor of the mean loss of each micro-batch, which all ranks must call.

        Args:
            step: the step.
            units: what the loss is a mean over; see `weights_of`.

        Raises:
            TrainingError: the batch has no unit.
        """
        return weights_of(step, units, world_size=self.loader.world_size)

    def meter(self, model: nn.Module) -> StepMeter:
        """Return what measures the noise of the gradient. All ranks must call it."""
        return StepMeter(model, self.loader)

    def scheduler(self, optimizer: Optimizer) -> ClockScheduler:
        """Return a scheduler of torch's kind that reports what the run sets."""
        return ClockScheduler(optimizer, self.timer)

    @property
    def is_done(self) -> bool:
        """Whether the run is over."""
        return self.horizon.is_done(self.timer.timestamp)

    @property
    def elapsed(self) -> float:
        """The fraction of the run that has passed, in [0, 1]."""
        return self.horizon.elapsed(self.timer.timestamp)

    @property
    def epoch_float(self) -> float:
        """Epochs passed; whole ones if the number of samples in the data set is not known."""
        now, num_samples = self.timer.timestamp, self.horizon.dataset_num_samples
        return now.sample / num_samples if num_samples else float(now.epoch)

    @property
    def num_steps(self) -> Count:
        """The number of steps in the whole run."""
        return counts.steps_left(self.prepared, Timestamp())

    @property
    def steps_left(self) -> Count:
        """The number of steps that are not finished."""
        return counts.steps_left(self.prepared, self.timer.timestamp)

    def steps_in_epoch(self, epoch: int) -> Count:
        """Return the number of steps that begin in an epoch, from 0."""
        return counts.steps_of_epoch(self.prepared, epoch)

    def micro_batches_in_epoch(self, epoch: int) -> Count:
        """Return the micro-batches of each rank in these steps; an iterable may have more."""
        world_size = self.loader.world_size
        return counts.micro_batches_of_epoch(
            self.prepared, epoch, world_size=world_size, micro_batch_size=self.micro_batch_size
        )

    def log_values(self) -> dict[str, float]:
        """Return values for a log line: the clock, the batch size and what is scheduled."""
        now = self.timer.timestamp
        return {
            "ep": self.epoch_float,
            "ba": now.batch,
            "sp": now.sample,
            "tok": now.token,
            "dur": self.elapsed,
            "batch_size": self.batch_size,
            **self.hyperparameters.values(),
            **self.loader.log_values(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON. It changes nothing.

        `open` says whether a step was drawn and not finished; after a resume, it comes anew.
        """
        is_open = self.step is not None
        return {"version": _VERSION, "open": is_open, "loader": self.loader.state_dict()}

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
                instead="pass what ExternalRun.state_dict() returned",
            )
        if self._loader is None:
            self._state = state
            return
        self._loader.load_state_dict(state["loader"])
        self.step, self.due = None, frozenset()
        self._seen = self._finished = self.timer.timestamp


def _unbound() -> TrainingError:
    return TrainingError.cannot(
        "take steps of a run",
        why="it is not bound to ranks and optimizers",
        instead="call bind(optimizers) first",
    )
