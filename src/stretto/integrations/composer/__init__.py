"""`Stretto(batch_size, schedules)`: a callback for the `Trainer` of Composer.

One element of the train dataloader is one optimizer step of a rank. Composer itself cuts it into
micro-batches, weighs them and averages over ranks, so algorithms and other callbacks stay as they
are. The clock of the run and that of Composer agree after each batch.

What cannot work is refused: schedulers of the trainer beside `schedules`; iterations as the length
of a run, and samples or tokens if some are dropped; `train_subset_num_batches` and
`fit(duration=...)`; steps with fewer samples than ranks; batch sizes that follow the noise under
FSDP or beside SAM. The noise is measured over samples, so do not follow it with
`accumulate_train_batch_on_tokens`, of which Composer does not tell its callbacks.

Tested with Composer 0.32. The names that Composer does not document are listed in
docs/integrations.md.
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
from stretto.errors import TrainingError
from stretto.integrations.composer.batches import (
    Noise,
    Steps,
    check_fit,
    check_length,
    check_schedulers,
    check_size,
    check_trainer,
    ends_epoch,
    plain,
)
from stretto.noise import NoiseMeter
from stretto.planning.bind import UNKNOWN, smallest_step
from stretto.run import Run, prepare
from stretto.settings import Loading

__all__ = ["Stretto"]


class Stretto(Callback):
    """Lets a trainer follow a batch size that changes, and schedules on an exact clock.

    The run is as long as `max_duration` of the trainer. The batch size of the train dataloader, or
    `device_train_microbatch_size`, is the most samples of a micro-batch.

    Args:
        batch_size: samples of one step over all ranks: a number, a text, a policy.
        schedules: by hyper-parameter; None, without a `rule`: the trainer's own schedulers stay.
        rule: how learning rates follow the batch size.
        loading: how data are loaded, as far as the `DataLoader` does not say.

    Raises:
        StrettoError: when the trainer is made, if it cannot be followed; the message says why.
    """

    def __init__(
        self,
        batch_size: PolicyLike,
        schedules: Mapping[str, Any] | None = None,
        *,
        rule: RuleLike | None = None,
        loading: Loading | None = None,
    ) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "schedules": schedules,
            "rule": rule,
            "loading": loading,
        }
        self._run: Run | None = None
        self._steps: Steps | None = None
        self._noise: Noise | None = None
        self._length: Time[int] | None = None

    @property
    def run(self) -> Run:
        """The run, from when the trainer is made: its clock is `run.timer`."""
        if self._run is None:
            raise TrainingError.cannot(
                "read the run",
                why="no trainer has this callback",
                instead="pass it in Trainer(callbacks=[...])",
            )
        return self._run

    def before_load(self, state: State, logger: Logger) -> None:
        """Bind the run: optimizers and data exist, and no saved state is loaded."""
        check_trainer(state)
        length = state.max_duration
        assert length is not None, "checked"
        self._run = run = prepare(
            DataSpec.of(plain(state.train_dataloader)),
            max_duration=length.to_timestring(),
            **self._settings,
        )
        check_schedulers(run, state)
        check_length(run, length)
        run.bind(
            list(state.optimizers),
            rank=dist.get_global_rank(),
            world_size=dist.get_world_size(),
        )
        check_size(smallest_step(run.prepared), run.loader.world_size)
        self._steps = state.train_dataloader = Steps(run)
        # At first the length is known in any case: without one, fit() refuses epochs.
        state.set_dataloader(self._steps, state.dataloader_label, self._steps.length or UNKNOWN)
        self._length = state.dataloader_len
        # Do not read batches to get to the epoch of a checkpoint: the run knows its place.
        state.dataset_resumption["train"] = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check what `fit` was given, and measure the model as it is trained."""
        run, length = self.run, state.max_duration
        assert length is not None, "checked"
        is_ours = state.train_dataloader is self._steps and state.dataloader_len == self._length
        if not is_ours or length.to_timestring() != str(run.horizon.max_duration):
            raise TrainingError.cannot(
                "train with what fit() was given",
                why="the run was prepared when the trainer was made",
                instead="pass it to Trainer(...)",
            )
        check_fit(run, state)
        if "noise" in run.loader.reads:
            self._noise = Noise(NoiseMeter.of(state.model, run.loader.spec))
        assert self._steps is not None, "set with the run"
        self._steps.is_over = int(state.timestamp.batch_in_epoch) > 0 and ends_epoch(run)
        self._read_length(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Say how many steps the epoch has."""
        self._read_length(state)

    def _read_length(self, state: State) -> None:
        assert self._steps is not None, "set with the run"
        self._steps.read_length()
        self._set_length(state)

    def _set_length(self, state: State) -> None:
        assert self._steps is not None, "set with the run"
        state.dataloader_len = -1 if self._steps.length is None else self._steps.length
        self._length = state.dataloader_len

    def batch_start(self, state: State, logger: Logger) -> None:
        """Prepare to measure the step."""
        step = self.run.step
        if self._noise is not None and step is not None and self.run.is_open:
            self._noise.begin(state, step)

    def before_backward(self, state: State, logger: Logger) -> None:
        """Measure the gradient of a micro-batch."""
        if self._noise is not None:
            self._noise.watch()

    def after_backward(self, state: State, logger: Logger) -> None:
        """Stop measuring, before gradients are clipped."""
        if self._noise is not None:
            self._noise.read(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the step, and compare the clocks."""
        run, now, before = self.run, state.timestamp, state.previous_timestamp
        assert before is not None, "set before each batch end"
        signals = NO_SIGNALS if self._noise is None else self._noise.end(state)
        if "loss" in run.loader.reads:
            signals = replace(signals, loss=state.total_loss_dict["loss/train/total"])
        assert run.step is not None, "begun"
        size, batch = run.step.num_samples, run.timer.batch + 1
        # As integers: a subtraction of two times takes Composer 5 us.
        samples, tokens = (
            int(now.sample) - int(before.sample),
            int(now.token) - int(before.token),
        )
        run.finish(signals, tokens=tokens or None)
        if samples != size or int(now.batch) != batch:
            raise TrainingError.cannot(
                "keep the clock of Composer",
                why=f"batch {batch} has {size} samples, and Composer counts {samples}",
                instead="give both the same get_num_samples_in_batch, which counts samples",
            )
        if run.timer.batch_in_epoch == 0 and self._steps is not None:
            # If the run ends here, Composer ends the epoch only if this was its last batch.
            self._steps.length = int(now.batch_in_epoch)
            self._set_length(state)
        logger.log_metrics({"batch_size": run.batch_size})

    def eval_end(self, state: State, logger: Logger) -> None:
        """Give the policy the metric that it follows."""
        reads = self.run.loader.reads
        for name, value in state.eval_metric_values.items():
            if f"{state.dataloader_label}/{name}" in reads:
                self.run.loader.note_metric(float(value))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run."""
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run."""
        self.run.load_state_dict(state)
