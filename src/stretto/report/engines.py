"""What goes into the files of Megatron and NeMo Automodel, so that they can follow a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from stretto.planning import Plan
from stretto.planning.borders import value_text

Engine: TypeAlias = Literal["megatron", "bridge", "automodel"]
"""Megatron-LM, Megatron-Bridge or NeMo Automodel."""
# A name for each value in `engine_settings`; '-': the engine has none.
_NAMES: Mapping[Engine, str] = {
    "megatron": "--train-iters --micro-batch-size --global-batch-size --lr-decay-style "
    "--lr-warmup-iters --min-lr --lr --weight-decay - --seq-length --dataloader-type "
    "--adam-beta1 --adam-beta2 - --adam-eps --clip-grad",
    "bridge": "train.train_iters train.micro_batch_size train.global_batch_size "
    "scheduler.lr_decay_style scheduler.lr_warmup_iters optimizer.min_lr optimizer.lr scheduler."
    "start_weight_decay scheduler.end_weight_decay model.seq_length dataset.dataloader_type "
    "optimizer.adam_beta1 optimizer.adam_beta2 - optimizer.adam_eps optimizer.clip_grad",
    "automodel": "--step_scheduler.max_steps --step_scheduler.local_batch_size --step_scheduler."
    "global_batch_size --lr_scheduler.lr_decay_style --lr_scheduler.lr_warmup_steps "
    "--lr_scheduler.min_lr --optimizer.lr --optimizer.weight_decay - - - "
    "- - --optimizer.betas --optimizer.eps --clip_grad_norm.max_norm",
}
_STATED = ("lr", "weight_decay", "betas", "eps", "clip_norm")
"""Settings of a run file's optimizer that engines have, too."""


def engine_settings(
    plan: Plan, engine: Engine, stated: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with which an engine can follow a plan, by name, and warnings.

    Args:
        plan: the plan.
        engine: the engine.
        stated: what a run file states: the arguments of its optimizer and `clip_norm`; None: there
            is no file.

    Raises:
        TrainingError: the engine cannot follow the plan.
    """
    from stretto.integrations.planned import PlannedSteps  # imports torch
    from stretto.integrations.shared import refuse

    micro = plan.micro_batch_size
    why, instead = "micro_batch_size is no number", "write one, such as micro_batch_size=4"
    refuse((type(micro) is not int, "write settings", why, instead))
    steps = PlannedSteps(plan, micro or 0, plan.world_size)
    if engine != "automodel":
        steps.check_growth(0)
    sizes = {*steps.sizes_from(0)}
    known = {**dict.fromkeys(_STATED), **(stated or {})}
    lr, decay = (plan.base.get(name, known[name]) for name in ("lr", "weight_decay"))
    betas, eps, clip = known["betas"], known["eps"], known["clip_norm"]
    betas = [*betas] if isinstance(betas, (list, tuple)) and len(betas) == 2 else [None] * 2
    text = None if None in betas else "[{},{}]".format(*betas)  # without a blank: an argument
    count, mean, tokens = steps.num_batches, steps.mean_size, plan.horizon.tokens_per_sample
    values = (count, micro, mean, "constant", 0, 0.0, lr, decay, decay, tokens, "single")
    values = (*values, *betas, text, eps, clip)
    named = dict(zip(_NAMES[engine].split(), values, strict=True), **{"-": None})
    settings = {name: one for name, one in named.items() if one is not None}
    own = f"without stretto, each step takes {mean:,} samples: these settings have no ramp"
    of_ramp = "; ".join(_moved(plan, steps.unit if engine == "megatron" else max(sizes)))
    notes = [own] if engine == "automodel" else [own, of_ramp]
    ranks = f"these settings are for world_size={plan.world_size}"
    said = [*plan.warnings, ranks]
    for names, what in (
        (known.keys() - _STATED, "is set apart from these settings"),
        ({name for name, one in known.items() if one is None}, "is left to the engine's default"),
    ):
        said += [f"{name} {what}" for name in sorted(names) if stated is not None]
    return settings, [*said, *(notes if len(sizes) > 1 else [])]


def _moved(plan: Plan, each: int) -> Iterator[str]:
    """Yield where Megatron's schedules go on a ramp: they count `each` samples as an iteration."""
    yield f"with step_batch_size_schedule, schedules count {each:,} samples as an iteration"
    count, total = plan.num_batches or 0, plan.num_samples or 0
    # Values of the user's own have no schedule there.
    end = {name: one for name, one in (plan.values_at_end or {}).items() if name in plan.scheduled}
    for change in plan.changes:
        if change.name not in end:
            continue
        at, name = change.at.batch, change.name
        # What begins with the value that was before shows in the iteration after.
        later = plan.values_at(at)[name] == plan.values_at(at - 1)[name]
        theirs = plan.batch_at_sample(at * each + later)
        yield f"{name} {change.what} at iteration {theirs:,} rather than {at + later:,}"
    ends = plan.batch_at_sample(count * each)
    before = plan.values_at(count - 1)
    if ends < count and any(before[name] != value for name, value in end.items()):
        yield f"schedules end at iteration {ends:,} rather than {count:,}"
    for name, value in end.items() if ends > count else ():
        found = plan.values_at(total // each)[name]
        if found != value:
            yield f"{name} ends at {value_text(found)} rather than {value_text(value)}"
