"""`attach(batch_size, schedules)`: a callback for the `Trainer` of Composer.

One element of the train dataloader is one optimizer step of a rank. Composer itself cuts it into
micro-batches, weighs them and averages over ranks, so algorithms and other callbacks stay as they
are. The clock of the run and that of Composer agree after each batch.

What cannot work is refused: schedulers of the trainer beside `schedules`; iterations as the length
of a run, and samples or tokens if some are dropped; `train_subset_num_batches` and
`fit(duration=...)`; steps with fewer samples than ranks; batch sizes that follow the noise under
FSDP or beside SAM. The noise is measured over samples, so do not follow it with
`accumulate_train_batch_on_tokens`, of which Composer does not tell its callbacks.

Tested with Composer 0.32. The names that Composer does not document are listed in
docs/coming-from/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer import Callback, Logger, State
from composer.core import Time
from composer.utils import dist

from stretto.batching import NO_SIGNALS, PolicyLike, RuleLike
from stretto.data import DataSpec
from stretto.integrations.composer.batches import (
    ComposerLoader,
    Noise,
    check_composer,
    check_fit,
    check_length,
    check_size,
    unshared,
)
from stretto.integrations.counts import UNREACHED, smallest_step
from stretto.integrations.shared import StepMeter, ends_epoch, note_metrics, refuse, warn_of_end
from stretto.run import Run, prepare
from stretto.settings import Loading
from stretto.timing.time import read_run

__all__ = ["ComposerCallback", "attach"]


def attach(
    batch_size: PolicyLike,
    schedules: Mapping[str, Any] | None = None,
    *,
    rule: RuleLike | None = None,
    loading: Loading | None = None,
) -> ComposerCallback:
    """Return a callback that lets a trainer follow a changing batch size and exact schedules.

    Pass it in `Trainer(callbacks=[...])`. The run is as long as `max_duration` of the trainer. The
    batch size of the train dataloader, or `device_train_microbatch_size`, is the most samples of a
    micro-batch. A trainer that cannot be followed is refused when it is made.

    Args:
        batch_size: samples of one step over all ranks: a number, a text, a policy.
        schedules: by hyper-parameter; None, without a `rule`: the trainer's own schedulers stay.
        rule: how learning rates follow the batch size.
        loading: how data are loaded, as far as the `DataLoader` does not say.
    """
    return ComposerCallback(batch_size=batch_size, schedules=schedules, rule=rule, loading=loading)


class ComposerCallback(Callback):
    """Gives a trainer the steps of a run and keeps both clocks equal; `attach` makes it."""

    run: Run
    """The run, from when the trainer is made: its clock is `run.timer`."""
    _steps: ComposerLoader
    _length: Time[int] | None

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings
        self.noise: Noise | None = None
        """Measures the noise of the gradient, if the policy reads it."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Bind the run: optimizers and data exist, and no saved state is loaded."""
        check_composer(state)
        length = state.max_duration
        assert length is not None, "checked"
        data = DataSpec.of(unshared(state.train_dataloader))
        self.run = run = prepare(data, max_duration=length.to_timestring(), **self._settings)
        check_length(run, state)
        rank, world_size = dist.get_global_rank(), dist.get_world_size()
        run.bind(list(state.optimizers), rank=rank, world_size=world_size)
        check_size(smallest_step(run), run.loader.world_size)
        self._steps = state.train_dataloader = ComposerLoader(run)
        # At first the length is known in any case: without one, fit() refuses epochs.
        state.set_dataloader(self._steps, state.dataloader_label, self._steps.length or UNREACHED)
        self._length = state.dataloader_len
        # Do not read batches to get to the epoch of a checkpoint: the run knows its place.
        state.dataset_resumption["train"] = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check what `fit` was given, and measure the model as it is trained."""
        run, length = self.run, state.max_duration
        assert length is not None, "checked"
        is_ours = state.train_dataloader is self._steps and state.dataloader_len == self._length
        is_ours = is_ours and read_run(length.to_timestring()) == run.horizon.max_duration
        why = "the run was prepared when the trainer was made"
        refuse((not is_ours, "train with what fit() was given", why, "pass it to Trainer(...)"))
        check_fit(run, state)
        if "noise" in run.loader.reads:
            self.noise = Noise(StepMeter(run, state.model))
        self._steps.is_over = int(state.timestamp.batch_in_epoch) > 0 and ends_epoch(run)
        self.epoch_start(state, logger)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Say how many steps the epoch has."""
        self._steps.read_length()
        self._set_length(state)

    def _set_length(self, state: State) -> None:
        state.dataloader_len = -1 if self._steps.length is None else self._steps.length
        self._length = state.dataloader_len

    def batch_start(self, state: State, logger: Logger) -> None:
        """Prepare to measure the step."""
        step = self.run.step
        if self.noise is not None and step is not None and self.run.is_open:
            self.noise.begin(state, step)

    def before_backward(self, state: State, logger: Logger) -> None:
        """Measure the gradient of a micro-batch."""
        if self.noise is not None:
            self.noise.watch()

    def after_backward(self, state: State, logger: Logger) -> None:
        """Stop measuring, before gradients are clipped."""
        if self.noise is not None:
            self.noise.read(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the step, and compare the clocks."""
        run, now, before = self.run, state.timestamp, state.previous_timestamp
        assert before is not None, "set before each batch end"
        signals = NO_SIGNALS if self.noise is None else self.noise.end(state)
        if "loss" in run.loader.reads:
            signals = replace(signals, loss=state.total_loss_dict["loss/train/total"])
        assert run.step is not None, "begun"
        size, batch = run.step.num_samples, run.timer.batch + 1
        # As integers: a subtraction of two times takes Composer 5 us.
        samples = int(now.sample) - int(before.sample)
        run.finish(signals, tokens=int(now.token) - int(before.token) or None)
        is_other = samples != size or int(now.batch) != batch
        why = f"batch {batch} has {size} samples, and Composer counts {samples}"
        instead = "give both the same get_num_samples_in_batch"
        refuse((is_other, "keep the clock of Composer", why, instead))
        if run.timer.timestamp.batch_in_epoch == 0:
            # If the run ends here, Composer ends the epoch only if this was its last batch.
            self._steps.length = int(now.batch_in_epoch)
            self._set_length(state)
        logger.log_metrics({"batch_size": run.batch_size})

    def eval_end(self, state: State, logger: Logger) -> None:
        """Give the policy the metric that it follows."""
        label, values = state.dataloader_label, state.eval_metric_values
        note_metrics(self.run, {f"{label}/{name}": value for name, value in values.items()})

    def fit_end(self, state: State, logger: Logger) -> None:
        """Warn if the run has not reached its end, and `stop_training` was not called."""
        length = state.max_duration
        if length is not None and read_run(length.to_timestring()) == self.run.horizon.max_duration:
            warn_of_end(self.run, "Composer", "Trainer(load_path=...)")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run."""
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run."""
        self.run.load_state_dict(state)
