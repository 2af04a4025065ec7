"""`Stretto(batch_size, schedules)`: a callback for the `Trainer` of Composer.

One element of the train dataloader is one optimizer step of a rank. Composer itself cuts it into
micro-batches, weighs them and averages over ranks, so algorithms and other callbacks stay as they
are. The clock of the run and that of Composer agree after each batch.

What cannot work is refused: schedulers of the trainer beside `schedules`;
`train_subset_num_batches` and `fit(duration=...)`; iterations as the length of a run; steps with
fewer samples than ranks; batch sizes that follow the noise under FSDP. The noise is measured over
samples, so do not follow it with `accumulate_train_batch_on_tokens`; Composer does not tell its
callbacks of that option.

Tested with Composer 0.32. The names that Composer does not document are listed in
docs/integrations.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import composer
from composer import Callback, Logger, State, TimeUnit
from composer.utils import dist

from stretto.batching import NO_SIGNALS, PolicyLike, RuleLike
from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.integrations.composer.batches import Steps, check_size, plain
from stretto.integrations.composer.noise import Noise
from stretto.integrations.counts import smallest_step
from stretto.integrations.preparation import prepare
from stretto.integrations.run import ExternalRun
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
        self._run: ExternalRun | None = None
        self._state: Mapping[str, Any] | None = None
        self._steps: Steps | None = None
        self._noise: Noise | None = None

    @property
    def run(self) -> ExternalRun:
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
        _check(state)
        length = state.max_duration
        assert length is not None, "checked"
        self._run = run = prepare(
            DataSpec.of(plain(state.train_dataloader)),
            max_duration=length.to_timestring(),
            **self._settings,
        )
        _check_schedulers(run, state)
        run.bind(
            list(state.optimizers),
            rank=dist.get_global_rank(),
            world_size=dist.get_world_size(),
        )
        check_size(smallest_step(run.prepared), run.loader.world_size)
        self._steps = state.train_dataloader = Steps(run)
        state.set_dataloader(self._steps, state.dataloader_label)
        # Do not read batches to get to the epoch of a checkpoint: the run knows its place.
        state.dataset_resumption["train"] = True
        if self._state is not None:
            run.load_state_dict(self._state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check what `fit` was given, and measure the model as it is trained."""
        run, length = self.run, state.max_duration
        assert length is not None, "checked"
        if state.train_dataloader is not self._steps or length.to_timestring() != str(
            run.horizon.max_duration
        ):
            raise TrainingError.cannot(
                "train with what fit() was given",
                why="the run was prepared when the trainer was made",
                instead="pass train_dataloader and max_duration to Trainer(...)",
            )
        if "noise" in run.loader.reads:
            if state.fsdp_enabled:
                raise TrainingError.cannot(
                    "follow the noise of the gradient under FSDP",
                    why="Composer shards the model in a way in which it is not measured",
                    instead="plan the batch sizes, such as '0ep:32 1ep:64'",
                )
            self._noise = Noise(run.meter(state.model))
        self._read_length(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Say how many steps the epoch has."""
        self._read_length(state)

    def _read_length(self, state: State) -> None:
        assert self._steps is not None, "set with the run"
        self._steps.read_length()
        state.dataloader_len = len(self._steps)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Prepare to measure the step."""
        if self._noise is not None and self.run.step is not None:
            self._noise.begin(state, self.run.step)

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
        signals = NO_SIGNALS if self._noise is None else self._noise.signals
        if "loss" in run.loader.reads:
            signals = replace(signals, loss=state.total_loss_dict["loss/train/total"])
        # As integers: a subtraction of two times takes Composer 5 us.
        sample, tokens = int(now.sample), int(now.token) - int(before.token)
        run.finish(signals, tokens=tokens or None)
        timer = run.timer
        if timer.sample != sample or timer.batch != int(now.batch):
            raise TrainingError.cannot(
                "keep the clock of Composer",
                why=f"it counts {sample - int(before.sample)} samples in the last batch, and"
                f" the clock is at {timer.timestamp.get('sp')} instead of {sample}sp",
                instead="give both the same get_num_samples_in_batch, which counts samples",
            )
        if timer.batch_in_epoch == 0 and self._steps is not None:
            # If the run ends here, Composer ends the epoch only if this was its last batch.
            self._steps.length = int(now.batch_in_epoch)
            state.dataloader_len = len(self._steps)
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
        self._state = state
        if self._run is not None:
            self._run.load_state_dict(state)


def _check(state: State) -> None:
    if not composer.__version__.startswith("0.32."):
        raise TrainingError.cannot(
            f"use Composer {composer.__version__}",
            why="only 0.32 was tested, and the loop of another version may differ",
            instead="install 'mosaicml>=0.32,<0.33'",
        )
    if state.train_dataloader is None or state.max_duration is None:
        raise TrainingError.cannot(
            "prepare a run",
            why="the trainer has no train_dataloader or no max_duration",
            instead="pass both to Trainer(...), not to fit()",
        )
    if state.max_duration.unit in (TimeUnit.ITERATION, TimeUnit.SECOND):
        raise TrainingError.cannot(
            f"train for {state.max_duration}",
            why="the run counts epochs, batches, samples and tokens",
            instead="write max_duration='2ep', for example",
        )
    try:
        whole = len(state.train_dataloader)
    except TypeError:
        whole = None
    length = state.dataloader_len
    if whole is not None and length is not None and int(length) != whole:
        raise TrainingError.cannot(
            f"use train_subset_num_batches={int(length)}",
            why="a run has all batches of its length",
            instead="leave it out, and set max_duration",
        )


def _check_schedulers(run: ExternalRun, state: State) -> None:
    if run.is_scheduled and state.schedulers:
        raise TrainingError.cannot(
            "follow two schedules",
            why="the trainer has schedulers",
            instead="leave them out, or leave out schedules and rule",
        )
    assert state.max_duration is not None, "checked"
    if state.schedulers and state.max_duration.unit == TimeUnit.EPOCH:
        num_samples = run.horizon.dataset_num_samples or 1000
        raise TrainingError.cannot(
            f"use the schedulers of a trainer for {state.max_duration.to_timestring()}",
            why="they take all epochs to have as many batches as the present one",
            instead=f"set max_duration='{state.max_duration.value * num_samples}sp', or pass "
            "schedules instead",
        )
