"""What a trainer of Hugging Face cannot do with a batch size that changes, refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import Trainer
from transformers import __version__ as transformers_version

from stretto.batching import split
from stretto.errors import TrainingError
from stretto.training.run import Run

EVENTS = ("evaluate", "save", "log")
"""What a trainer can do now and then."""
_MEANS = frozenset(
    {
        "BinaryCrossEntropyLoss", "ContrastiveLoss", "CosineSimilarityLoss", "CrossEntropyLoss",
        "DistillKLDivLoss", "EmbedDistillLoss", "MSELoss", "MarginMSELoss", "SoftmaxLoss",
        "TripletLoss",
    }
)  # fmt: skip
"""Losses of sentence-transformers that are means over samples."""


_HOOKS = (
    "get_train_dataloader", "set_initial_training_values", "create_scheduler", "get_batch_samples",
    "training_step", "compute_loss", "floating_point_ops", "get_tp_size", "get_cp_size",
    "get_sp_size",
)  # fmt: skip
"""The methods of a trainer that are used or extended."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse a trainer with settings that cannot be followed.

    Raises:
        TrainingError: it has one.
    """
    missing = [name for name in _HOOKS if not hasattr(Trainer, name)]
    hook = getattr(Trainer, "set_initial_training_values", None)
    if missing or list(inspect.signature(hook or len).parameters) != ["self", "args", "dataloader"]:
        raise TrainingError.cannot(
            f"use transformers {transformers_version}",
            why=f"its trainer has no {missing[0]}" if missing else "its trainer has other hooks",
            instead="install transformers 5.23, or a version with the same hooks",
        )
    args = trainer.args
    parallel = [one for one in ("tp", "cp", "sp") if getattr(trainer, f"get_{one}_size")() > 1]
    refusals = {
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


def check_best(trainer: Trainer, every: Mapping[str, Any]) -> None:
    """Refuse to load the best model where the trainer would not note which one it is.

    Raises:
        TrainingError: it would not.
    """
    if trainer.args.load_best_model_at_end and every and trainer.args.save_strategy != "best":
        raise TrainingError.cannot(
            f"use load_best_model_at_end with every={dict(every)!r}",
            why="the trainer notes the best model only where its own strategies evaluate and save",
            instead="write save_strategy='best', or leave every out and set eval_strategy and "
            "save_strategy",
        )


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


def check_loss(trainer: Any, run: Run, kind: str | None) -> None:
    """Refuse a loss that cannot be computed in parts, if ranks or micro-batches share a step.

    Raises:
        TrainingError: the trainer has such a loss.
    """
    own = getattr(trainer, "loss", None)
    others = [] if own is None else [one for one in _losses(own) if _name(one) not in _MEANS]
    if kind is not None and not others:
        return
    sizes, bounds = run.prepared.sizes, run.prepared.bound_policy.bounds
    planned = [one.batches.size for one in sizes.segments] if sizes else [0]
    largest = max(planned if sizes or bounds is None else bounds)
    share = split(largest, run.loader.world_size, run.micro_batch_size) if largest else None
    if share is None or share.accumulation > 1 or run.loader.world_size > 1:
        name = type(others[0]).__name__ if others else f"the loss of {type(trainer.model).__name__}"
        raise TrainingError.cannot(
            f"compute {name} in micro-batches of {run.micro_batch_size} "
            f"on {run.loader.world_size} ranks",
            why="the loss of a batch is not known to be a mean over its samples or targets: it "
            "may compare samples with each other, weigh classes, or add a term such as that of "
            "a router",
            instead="train on one rank and set per_device_train_batch_size to the largest batch, "
            "or leave the term out (for a router: output_router_logits=False)",
        )


def _losses(loss: Any) -> list[Any]:
    """Return the losses of a trainer of sentence-transformers, also those inside wrappers."""
    if isinstance(loss, Mapping):
        return [inner for one in loss.values() for inner in _losses(one)]
    # With `n_dims_per_step`, each micro-batch would draw its own dimensions.
    is_wrapper = _name(loss) == "MatryoshkaLoss" and loss.n_dims_per_step < 1
    return _losses(loss.loss) if is_wrapper else [loss]


def _name(loss: Any) -> str | None:
    """Return the name of a loss of sentence-transformers itself."""
    kind = type(loss)
    return kind.__name__ if kind.__module__.startswith("sentence_transformers.") else None
