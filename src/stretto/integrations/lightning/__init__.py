"""`attach(trainer, batch_size, schedules, data=...)`: stretto in the `Trainer` of Lightning.

One element of the train dataloader is one micro-batch. Automatic optimization stays: Lightning
accumulates over the micro-batches of a step, clips, steps and logs as before.

What cannot work is refused: `max_epochs` beside `max_steps`, `fast_dev_run`, checkpoints without
the state of stretto, `accumulate_grad_batches`, `limit_train_batches`, `overfit_batches`;
`val_check_interval` as a number of batches or a time;
`GradientAccumulationScheduler`, `BatchSizeFinder` and `StochasticWeightAveraging`; learning rate
schedulers of the module beside `schedules`; batch sizes that follow the noise under FSDP2
or in manual optimization. Data of unknown length have no progress bar
with a total.

With manual optimization, `training_step` multiplies its loss by `dataloader.weight`, and steps its
optimizers if `dataloader.is_last`.

Tested with Lightning 2.6. The names that Lightning does not document are listed in
docs/coming-from/.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from stretto.batching import PolicyLike, RuleLike
from stretto.data import DataSpec
from stretto.data.weights import Units, unit_counter
from stretto.errors import DataError
from stretto.integrations.lightning.callback import (
    LightningCallback,
    LightningLoader,
    check_lightning,
    own_interval,
    own_length,
)
from stretto.integrations.shared import check_call, with_lengths
from stretto.run import prepare
from stretto.settings import Loading
from stretto.timing import TimeLike, Trigger

__all__ = ["LightningLoader", "attach"]

_LAUNCHER = "STRETTO_LIGHTNING_LAUNCHER"
"""Environment variable: the process that has prepared the data before it launches the others."""


def attach(
    trainer: Trainer,
    batch_size: PolicyLike,
    schedules: Mapping[str, Any] | None = None,
    *,
    data: Any,
    rule: RuleLike | None = None,
    every: Mapping[str, Trigger | TimeLike] | None = None,
    max_duration: TimeLike | None = None,
    units: Units | None = None,
    micro_batch_size: int | str | None = None,
    loading: Loading | None = None,
    **facts: Any,
) -> LightningLoader:
    """Let a trainer follow a batch size that changes, and schedules on an exact clock.

    Call it before `trainer.fit`, on every rank, and pass what it returns to `trainer.fit`; or pass
    `datamodule=` the data module that was attached, which is prepared and set up here. The
    `batch_size` of a `DataLoader` is the most samples of a micro-batch from now on, if there is no
    other.

    Args:
        trainer: the trainer.
        batch_size: samples or tokens of one step over all ranks: a number, a text, a policy.
        schedules: by hyper-parameter; None, without a `rule`: the module's own schedulers stay.
        data: a `DataLoader`, a `LightningDataModule`, a data set, an iterable of batches, or a
            `DataSpec`.
        rule: how learning rates follow the batch size.
        every: when to "evaluate" and to "save". Without "evaluate", as `val_check_interval` and
            `check_val_every_n_epoch` say.
        max_duration: how long to train; None: `max_steps` or `max_epochs` of the trainer.
        units: what the loss is a mean over: "samples", "tokens", or a function of a batch. None:
            samples; a loss that is not known to be a mean over them is refused.
        micro_batch_size: the most samples of a micro-batch, or its most tokens, such as `"8Ktok"`.
        loading: how data are loaded, as far as the `DataLoader` does not say.
        facts: fields of `DataSpec`, such as `lengths`.

    Returns:
        The train dataloader.

    Raises:
        StrettoError: the trainer or the settings cannot be followed; the message says why.
    """
    call = "attach(trainer, 8, {'lr': Cosine()}, data=..., every={'save': '10%'})"
    check_call(call, Trainer, trainer, batch_size, schedules=schedules, every=every)
    when = {} if every is None else every
    check_lightning(trainer, when)
    unit_counter("samples" if units is None else units)  # checks them
    LightningCallback.leave(trainer)  # one that was attached before
    module = data if isinstance(data, LightningDataModule) else None
    if module is not None:
        data = _opened(module, trainer)
    some = [*data.values()] if isinstance(data, dict) else data
    is_many = isinstance(some, (list, tuple)) and some and isinstance(some[0], DataLoader)
    if is_many or isinstance(data, CombinedLoader):
        what, instead = f"follow a {type(data).__name__} of dataloaders", "give one DataLoader"
        raise DataError.cannot(what, why="a run has one order of samples", instead=instead)
    evaluate = when["evaluate"] if "evaluate" in when else own_interval(trainer)
    if micro_batch_size is None and isinstance(data, DataLoader):
        micro_batch_size = data.batch_size
    run = prepare(
        DataSpec.of(data, **facts),
        batch_size,
        max_duration=own_length(trainer) if max_duration is None else max_duration,
        schedules=schedules,
        rule=rule,
        every={**when, "evaluate": evaluate},
        micro_batch_size=micro_batch_size,
        loading=loading,
    )
    batches = LightningLoader(with_lengths(run), units)
    # First, so that other callbacks see the clock behind the step and the rates of the next one.
    trainer.callbacks.insert(0, LightningCallback(batches, ends_epochs=evaluate == "1ep"))
    if module is not None:
        module.train_dataloader = lambda: batches
    return batches


def _opened(module: LightningDataModule, trainer: Trainer) -> Any:
    """Set a data module up to train and return its own dataloader.

    Lightning does not set it up again, since that might split the data anew.
    """
    kind, strategy = type(module), trainer.strategy
    module.trainer, trainer.datamodule = trainer, module  # as when Lightning calls its hooks
    environment = getattr(strategy, "cluster_environment", None)
    if environment is not None and not environment.creates_processes_externally:
        os.environ[_LAUNCHER] = str(os.getpid())
    elif environment is not None and os.environ.get(_LAUNCHER) != str(os.getppid()):
        strategy.setup_environment()  # connects the ranks, as fit() does
    trainer._data_connector.prepare_data()  # on one rank, or one of each node; others wait
    kind.setup(module, "fit")
    module.setup = lambda stage: None if stage == "fit" else kind.setup(module, stage)
    return kind.train_dataloader(module)
