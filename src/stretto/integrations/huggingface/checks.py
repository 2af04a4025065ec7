"""What a trainer of Hugging Face cannot do with a batch size that changes, refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import Trainer
from transformers import __version__ as transformers_version

from stretto.batching import split
from stretto.errors import TrainingError
from stretto.integrations.huggingface.callback import EVENTS
from stretto.integrations.run import ExternalRun

_IN_BATCH = (
    "MultipleNegatives",
    "GIST",
    "InBatch",
    "MegaBatch",
    "BatchHard",
    "BatchSemi",
    "BatchAll",
)
"""Parts of the names of losses of sentence-transformers that compare the samples of a batch."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse a trainer with settings that cannot be followed.

    Raises:
        TrainingError: it has one.
    """
    args = trainer.args
    parallel = [one for one in ("tp", "cp", "sp") if getattr(trainer, f"get_{one}_size")() > 1]
    refusals = {
        f"use transformers {transformers_version}": (
            len(inspect.signature(Trainer.set_initial_training_values).parameters) != 3,
            "its trainer has other hooks",
            "install transformers 5.23, or a version with the same hooks",
        ),
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


def check_loss(trainer: Any, run: ExternalRun) -> None:
    """Refuse a loss that compares the samples of a batch, if a share is several micro-batches.

    Raises:
        TrainingError: the trainer has such a loss.
    """
    name, sizes = type(getattr(trainer, "loss", None)).__name__, run.prepared.sizes
    if any(one in name for one in _IN_BATCH):
        bounds = run.prepared.bound_policy.bounds
        planned = [one.batches.size for one in sizes.segments] if sizes else [0]
        largest = max(planned if sizes or bounds is None else bounds)
        share = split(largest, run.loader.world_size, run.micro_batch_size) if largest else None
        if share is None or share.accumulation > 1:
            raise TrainingError.cannot(
                f"train with {name} in micro-batches of {run.micro_batch_size}",
                why="it compares the samples of a batch with each other",
                instead="set per_device_train_batch_size to the largest share of a rank",
            )
