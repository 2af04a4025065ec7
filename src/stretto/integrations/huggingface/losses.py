"""What the loss of a trainer is a mean over, measured before the first step.

Whether a loss is divided by `num_items_in_batch` does not follow from any signature: BERT accepts
it among its `**kwargs` and returns a mean all the same. So the loss of a few samples is computed
without gradients: with `num_items_in_batch`, with twice as many, and for each half of the samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from stretto.data import MicroBatch
from stretto.data.containers import join_samples, take_samples
from stretto.data.tokens import IGNORED_LABEL
from stretto.data.weights import Units
from stretto.errors import DataError
from stretto.integrations.shared import refuse
from stretto.run import Run
from stretto.runtime.gradients import all_gather_rows, is_started
from stretto.runtime.random_state import RandomState

Kind: TypeAlias = Literal["divided", "divided on its rank", "targets", "shifted", "samples"]
"""`divided`: by `num_items_in_batch`, times the number of ranks, as transformers does it; `divided
on its rank`: without that factor. The others are means: over labels that are not -100, over these
without the first of each sequence, and over samples."""
KINDS: tuple[Kind, ...] = ("divided", "divided on its rank", "targets", "shifted", "samples")
_LOGS = ("_metrics", "_total_train_tokens", "_stored_metrics", "accum_loss_components")
"""Where the trainers of TRL and sentence-transformers collect what they log."""


def units(kind: Kind, ignored: int) -> Units:
    """Return what counts the units of a mean; see `ignored_pixel`."""
    return "samples" if kind == "samples" else lambda one: _targets(one, ignored, kind == "shifted")


def ignored_pixel(model: Any) -> int:
    """Return the class of the pixels that the loss of a segmentation model ignores."""
    config = getattr(model, "config", None)
    return getattr(config, "semantic_loss_ignore_index", IGNORED_LABEL)


def measure(trainer: Any, model: Any, micros: Sequence[MicroBatch], num_items: Any) -> Kind | None:
    """Return what the loss is a mean over; None: no known kind. All ranks must call it.

    Args:
        trainer: the trainer, whose `compute_loss` returns losses without weights now.
        model: the model as the trainer calls it.
        micros: the micro-batches of the first step.
        num_items: what the trainer passes as `num_items_in_batch`; None if it does not.

    Raises:
        TrainingError: the loss is finite on no rank.
    """
    model = getattr(model, "_orig_mod", model)  # not compiled for this
    logs = {name: copy.deepcopy(getattr(trainer, name)) for name in _LOGS if hasattr(trainer, name)}
    modes, random = [(one, one.training) for one in model.modules()], RandomState.now()
    model.eval()
    try:
        fits = _fits(trainer, model, micros, random, divides=num_items is not None)
    finally:
        for one, mode in modes:
            one.training = mode
        random.restore()
        vars(trainer).update(logs)
    rows = all_gather_rows(fits) if is_started() else [fits]
    known = [row.tolist() for row in rows if row[-1]]
    why = "the loss of the samples that it is measured with is not finite"
    refuse((not known, "weigh the losses of micro-batches", why, "check the data and the labels"))
    return next((one for at, one in enumerate(KINDS) if all(row[at] for row in known)), None)


def _fits(
    trainer: Any,
    model: Any,
    micros: Sequence[MicroBatch],
    random: RandomState,
    *,
    divides: bool,
) -> Tensor:
    """Return a flag for each kind that fits this rank's samples, and whether they can tell."""
    ignored = ignored_pixel(trainer.model)
    whole, halves, counts = _halves(micros, trainer.stretto.run, ignored)

    def at(batch: Any, num_items: float | None) -> float:
        random.restore()
        inputs = trainer._prepare_inputs(copy.copy(batch))
        number = None if num_items is None else torch.tensor(num_items, device=trainer.args.device)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            try:
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=number)
            except Exception:
                if num_items is not None or not divides:
                    raise
                return math.nan  # it always needs the number
            return float(loss.detach().mean())

    labels, items = _classes(whole), _targets(whole, ignored)
    # Only sequences of labels can be shifted.
    both: tuple[tuple[Kind, bool], ...] = (("targets", False), ("shifted", True))
    kinds = both[: 0 if labels is None else labels.ndim]
    mean, means = at(whole, None), [at(one, None) for one in halves]
    args, types = trainer.args, {one.dtype for one in model.parameters()}
    is_coarse = args.bf16 or args.fp16 or args.tf32 or types & {torch.bfloat16, torch.float16}
    tolerance = 3e-3 if is_coarse else 3e-6
    found, is_known = dict.fromkeys(KINDS, False), math.isfinite(mean)
    if divides:
        once, twice = at(whole, items), at(whole, 2 * items)
        parts = sum(at(one, items) for one in halves)
        is_known = math.isfinite(once)
        if _close(2 * twice, once, 1e-5) and _close(parts, once, tolerance):
            totals = [_targets(whole, ignored, is_shifted) for _, is_shifted in kinds] or [1]
            is_own = any(_close(once * items, mean * total, tolerance) for total in totals)
            is_own = is_own and args.world_size > 1
            found["divided on its rank" if is_own else "divided"] = True
        divides = not _close(twice, once, 1e-5)
    if not divides:
        found["samples"] = _is_mean(mean, means, counts, tolerance)
        for kind, is_shifted in kinds:
            shares = [_targets(one, ignored, is_shifted) for one in halves]
            found[kind] = _is_mean(mean, means, shares, tolerance)
    return torch.tensor([*found.values(), is_known], dtype=torch.int64)


def _halves(
    micros: Sequence[MicroBatch], run: Run, ignored: int
) -> tuple[Any, list[Any], list[int]]:
    """Return some samples, both halves of them, and how many samples these have.

    Of a map-style data set, one half has few targets and the other many. A batch of a stream that
    cannot be cut is its own half.
    """
    loader, most = run.loader, max(2, min(8, run.micro_batch_size or 8)) // 2
    num_samples = (loader.spec.known_num_samples or 0) if loader.spec.is_map_style else 0
    parts: list[list[int]] = []
    if num_samples > 1:
        some = range(0, num_samples, -(-num_samples // 16))
        near = sorted((_targets(loader.example_batch([at]), ignored), at) for at in some)
        ordered = [at for targets, at in near if targets] or [*some]
        parts = [ordered[:most], ordered[-most:]]
        whole, count = loader.example_batch([*parts[0], *parts[1]]), 2 * len(parts[0])
    else:
        micro = max(micros, key=lambda one: _targets(one.batch, ignored))
        whole, count = micro.batch, max(1, micro.num_samples)
    try:
        if count == 1:
            whole, count = join_samples([whole, whole], [1, 1]), 2
        half = min(most, count // 2)
        whole = _unlike(take_samples(whole, slice(0, 2 * half), count), half, ignored)
        cuts = slice(0, half), slice(half, 2 * half)
        return whole, [take_samples(whole, one, 2 * half) for one in cuts], [half, half]
    except DataError:
        # Samples in one row, or rows of several kinds: collate the halves by themselves.
        if not parts:
            return whole, [whole], [count]
        return whole, [loader.example_batch(one) for one in parts], [len(one) for one in parts]


def _unlike(batch: Any, half: int, ignored: int) -> Any:
    """Return a batch whose halves are of different classes, so that weights of classes show.

    If some labels are ignored, each sample of the first half keeps one target, its last.
    """
    labels = _classes(batch)
    if labels is None or len(labels) != 2 * half:
        return batch
    labels = labels.clone(memory_format=torch.contiguous_format)
    rows = labels.view(2 * half, -1)
    is_target = _is_target(labels, ignored).view_as(rows)
    if not is_target.all():
        later = is_target[:half].flip(1).cumsum(1).flip(1) > 1
        rows[:half][later] = ignored if labels.ndim > 2 else IGNORED_LABEL
        is_target[:half] &= ~later
    if is_target.any():
        low, high = rows[is_target].min(), rows[is_target].max()
        rows[:half][is_target[:half]] = low
        rows[half:][is_target[half:]] = high if high > low else (low == 0).to(low.dtype)
    batch = copy.copy(batch)
    batch["labels" if "labels" in batch else "label"] = labels
    return batch


def _classes(batch: Any) -> Tensor | None:
    """Return the labels of a batch if they are classes."""
    labels = batch.get("labels", batch.get("label")) if isinstance(batch, Mapping) else None
    is_class = isinstance(labels, Tensor) and labels.ndim and not labels.is_floating_point()
    return labels if is_class else None


def _is_target(labels: Tensor, ignored: int) -> Tensor:
    return labels != (ignored if labels.ndim > 2 else IGNORED_LABEL)


def _targets(batch: Any, ignored: int, shifted: bool = False) -> int:
    labels = _classes(batch)
    if labels is None:
        return 1
    return int(_is_target(labels[..., 1:] if shifted else labels, ignored).count_nonzero())


def _is_mean(mean: float, parts: Sequence[float], counts: Sequence[int], tolerance: float) -> bool:
    pairs = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    return _close(mean * sum(counts), sum(part * count for part, count in pairs), tolerance)


def _close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
