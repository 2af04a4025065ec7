"""Names that other libraries use for an argument, and what to write here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any, TypeVar

from stretto.errors import ConfigError

_LENGTH = "max_duration, such as '3ep', '1000ba' or '2Btok'"
_CLIP = "clip_norm, such as 1.0"
_WARMUP = "warmup of a schedule, such as Cosine(warmup='5%')"
_EVALUATE = "evaluate: an Evaluation(data, every='10%')"
_MICRO = "micro_batch_size, the most samples of one forward pass"
_RATE = "schedules={'lr': Cosine(warmup='5%')}"
FOREIGN = {
    **dict.fromkeys(("max_epochs", "epochs", "num_epochs", "num_train_epochs"), _LENGTH),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "max_time"), _LENGTH),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "grad_clip"), _CLIP),
    **dict.fromkeys(("mixed_precision", "fp16", "bf16", "amp"), "precision, such as 'bf16'"),
    **dict.fromkeys(("T_max", "total_iters", "num_training_steps"),
                    "over, such as over='80%'; by default a schedule lasts for the whole run"),
    "eta_min": "end, as a factor of the learning rate, such as end=0.1",
    "T_0": "CosineRestarts(period='1ep')",
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "num_warmup_steps", "warmup_iters"), _WARMUP),
    **dict.fromkeys(("validate_frequency", "eval_interval", "eval_steps", "eval_strategy",
                     "val_check_interval", "check_val_every_n_epoch", "val_data", "eval_dataset",
                     "val_dataloaders"), _EVALUATE),
    **dict.fromkeys(("save_steps", "save_interval", "save_every"), "checkpoint, such as '1ep'"),
    **dict.fromkeys(("log_every_n_steps", "logging_steps", "log_interval"), "log, such as '10ba'"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches",
                     "per_device_train_batch_size", "device_train_microbatch_size"), _MICRO),
    **dict.fromkeys(("lr_scheduler", "scheduler", "lr_schedule", "get_factor"), _RATE),
    **dict.fromkeys(("learning_rate", "lr"), "the lr of the optimizer"),
    "batch_increase_function": "batch_size=IncreaseFunction(function, 32), of stretto.batching",
    **dict.fromkeys(("gpus", "devices", "accelerator"), "device, and start ranks with torchrun"),
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "train_dataset"), "train_data"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss"),
}  # fmt: skip
"""By the name: the argument or the value to write instead."""
F = TypeVar("F", bound=Callable[..., Any])


def check_foreign(given: Iterable[str], own: Collection[str] = ()) -> None:
    """Refuse names of other libraries.

    Raises:
        ConfigError: there is one that is not among the `own` names.
    """
    for name in given:
        if name in FOREIGN and name not in own:
            raise ConfigError.cannot(
                f"use {name}=...",
                why="stretto has no argument of that name",
                instead=f"write {FOREIGN[name]}",
            )


def knows_foreign(function: F) -> F:
    """Decorate a function so that an argument of another library is answered by what to write."""
    own = inspect.signature(function).parameters

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        check_foreign(named, own)
        return function(*given, **named)

    return call  # type: ignore[return-value]
