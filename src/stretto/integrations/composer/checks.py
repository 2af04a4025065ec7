"""What a trainer of Composer cannot do with a batch size that changes, refused by name."""

from __future__ import annotations

import composer
from composer import State, TimeUnit
from composer.core import Time

from stretto.errors import TrainingError
from stretto.training.run import Run


def check_trainer(state: State) -> None:
    """Refuse a trainer that cannot be followed.

    Raises:
        TrainingError: it is such a one, or of another version.
    """
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


def check_schedulers(run: Run, state: State) -> None:
    """Refuse schedulers of the trainer that contradict the run or would be wrong.

    Raises:
        TrainingError: there are some.
    """
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


def check_length(run: Run, length: Time[int]) -> None:
    """Refuse a length of which Composer and the run count the end differently.

    Raises:
        TrainingError: it is in samples or tokens, and some are dropped.
    """
    if run.horizon.last_batch == "drop" and length.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
        raise TrainingError.cannot(
            f"train for {length.to_timestring()} and drop the last batch of each epoch",
            why="Composer does not count the samples that are dropped",
            instead="write max_duration in epochs or batches, or Loading(last_batch='keep')",
        )


def check_fit(run: Run, state: State) -> None:
    """Refuse what `fit` was given, or what a checkpoint does not have.

    Raises:
        TrainingError: there is something.
    """
    check_schedulers(run, state)
    ours, theirs = run.timer.batch, int(state.timestamp.batch)
    if ours != theirs:
        raise TrainingError.cannot(
            f"continue at batch {theirs} of Composer with a run at batch {ours}",
            why="the checkpoint has no state of Stretto, or you called fit(reset_time=True)",
            instead="make a new Trainer, with load_weights_only=True for such a checkpoint",
        )
    metrics = {f"{one.label}/{name}" for one in state.evaluators for name in one.metric_names}
    unknown = run.loader.reads - {"loss", "noise"} - metrics
    if unknown:
        raise TrainingError.cannot(
            f"follow {', '.join(sorted(unknown))}",
            why="no evaluator has that metric",
            instead=f"follow one of {', '.join(sorted(metrics))}"
            if metrics
            else "pass an eval_dataloader and a model with metrics",
        )
    if "noise" in run.loader.reads:
        check_noise(state)


def check_noise(state: State) -> None:
    """Refuse to measure the noise where passes are not those of a step, one by one.

    Raises:
        TrainingError: the model is sharded, or an optimizer runs the step itself.
    """
    if state.fsdp_enabled:
        why = "Composer shards the model in a way in which it is not measured"
    elif any(getattr(one, "_step_supports_amp_closure", False) for one in state.optimizers):
        why = "an optimizer, such as that of SAM, computes the step more than once"
    else:
        return
    raise TrainingError.cannot(
        "follow the noise of the gradient",
        why=why,
        instead="plan the batch sizes, such as '0ep:32 1ep:64'",
    )
