"""`attach(trainer, batch_size, schedules)`: stretto in trainers of Hugging Face.

For `transformers.Trainer` and what derives from it: TRL's SFTTrainer and DPOTrainer,
sentence-transformers. One element of the train dataloader is one optimizer step, and its
micro-batches run through the trainer's own `training_step`, so everything else stays as it is.

What cannot work is refused: `gradient_accumulation_steps` above 1; samplers other than random and
sequential ones (group by length, weights, GRPO); several GPUs in one process; DeepSpeed; tensor,
context and sequence parallelism; on several ranks, `average_tokens_across_devices=False`; losses
that compare the samples of a batch, if it is more than one micro-batch.

Tested with transformers 5.23, accelerate 1.15, TRL 1.16 and sentence-transformers 5. The hooks that
transformers does not document are listed in docs/coming-from/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from transformers import Trainer

from stretto.batching import PolicyLike, RuleLike
from stretto.batching.seesaw import Pair
from stretto.data.weights import Units, unit_counter
from stretto.integrations.huggingface.trainer import Follows, StrettoCallback, check_hugging_face
from stretto.integrations.shared import check_call, warn_of_replaced
from stretto.timing import LastBatch, TimeLike, Trigger

__all__ = ["StrettoCallback", "attach"]

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def attach(
    trainer: AnyTrainer,
    batch_size: PolicyLike | Pair,
    schedules: Mapping[str, Any] | None = None,
    *,
    rule: RuleLike | None = None,
    units: Units | None = None,
    every: Mapping[str, Trigger | TimeLike] | None = None,
    max_duration: TimeLike | None = None,
    micro_batch_size: int | str | None = None,
    last_batch: LastBatch | None = None,
    **facts: Any,
) -> AnyTrainer:
    """Let a trainer follow a batch size that changes, and schedules on an exact clock.

    Call it before `trainer.train()`, on every rank. `per_device_train_batch_size` is the most
    samples of a micro-batch from now on, if there is no other.

    Args:
        trainer: the trainer, as it was built.
        batch_size: samples or tokens of one step over all ranks: a number, a text, a policy.
        schedules: by hyper-parameter; None: `args.lr_scheduler_type`, over the clock.
        rule: how learning rates follow the batch size.
        units: what the loss is a mean over: "samples", "tokens" (targets), or a function that
            counts them. None: it is measured, and refused if it is no known mean.
        every: when to "evaluate", "save" or "log", beside what the strategies of `args` say.
        max_duration: how long to train; None: `args.max_steps` or `args.num_train_epochs`.
        micro_batch_size: the most samples of a micro-batch, or its most tokens, such as `"8Ktok"`.
        last_batch: what happens if an epoch ends inside a batch; None: `drop` with
            `args.dataloader_drop_last`, else `keep`.
        facts: fields of `DataSpec`, such as `lengths`, or `num_samples` of a stream.

    Returns:
        The trainer.

    Raises:
        StrettoError: the trainer or its settings cannot follow; the message says why.
    """
    call = "attach(trainer, 8, {'lr': Cosine()}, every={'save': '10%'})"
    check_call(call, Trainer, trainer, batch_size, schedules=schedules, every=every)
    when = {} if every is None else every
    unit_counter("samples" if units is None else units)  # checks them
    check_hugging_face(trainer, when)
    kind = type(trainer)
    if issubclass(kind, Follows):  # attached before, as in a notebook
        kind = next(one for one in kind.__mro__ if not issubclass(one, Follows))  # type: ignore[assignment]
        warn_of_replaced(has_begun=trainer.stretto.begun is not None)
        trainer.pop_callback(StrettoCallback)
    trainer.stretto = own = StrettoCallback(
        batch_size=batch_size,
        schedules={} if isinstance(batch_size, Pair) and schedules is None else schedules,
        rule=rule,
        max_duration=max_duration,
        every=when,
        micro_batch_size=micro_batch_size,
        last_batch=last_batch,
    )
    own.facts, own.units = facts, units
    trainer.__class__ = type(f"Stretto{kind.__name__}", (Follows, kind), {})
    trainer.callback_handler.callbacks.insert(0, own)
    own.look = trainer.get_train_dataloader
    own.look()  # refuse now what cannot be followed
    return trainer
