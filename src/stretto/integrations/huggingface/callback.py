"""What `attach` adds to a trainer: the run, the dataloader of its steps, and a callback."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from stretto.batching import NO_SIGNALS
from stretto.data import DataSpec, Step
from stretto.integrations.huggingface.losses import Kind
from stretto.integrations.meter import StepMeter
from stretto.planning.counts import end_of
from stretto.settings import Loading
from stretto.timing import LastBatch
from stretto.training.run import Run, prepare

EVENTS = ("evaluate", "save", "log")
"""What a trainer can do now and then."""


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
        self._meter: tuple[Any, StepMeter] | None = None

    def begin(self, spec: DataSpec, loading: Loading) -> Run:
        """Prepare the run for a call of `trainer.train()`."""
        settings = dict(self.settings)
        if settings["schedules"] is None:
            settings["schedules"] = {"lr": lambda timer: self.curve(timer.get_elapsed_duration())}
        self.run = prepare(spec, loading=loading, **settings)
        return self.run

    def meter(self, model: Any) -> StepMeter | None:
        """Return what measures noise, if the policy reads it."""
        if "noise" not in self.run.loader.reads:
            return None
        if self._meter is None or self._meter[0] is not model:
            self._meter = model, StepMeter(model, self.run.loader)
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
