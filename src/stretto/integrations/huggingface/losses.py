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

from stretto.data import MicroBatch, StepLoader
from stretto.data.containers import join_samples, take_samples
from stretto.data.tokens import IGNORED_LABEL
from stretto.errors import DataError, TrainingError
from stretto.runtime.collectives import all_gather_rows, is_started
from stretto.runtime.random_state import RandomState
from stretto.training.weights import Units

Kind: TypeAlias = Literal["divided", "divided on its rank", "targets", "shifted", "samples"]
"""`divided`: by `num_items_in_batch`, times the number of ranks, as transformers does it; `divided
on its rank`: without that factor. The others are means: over labels that are not -100, over these
without the first of each sequence, and over samples."""
KINDS: tuple[Kind, ...] = ("divided", "divided on its rank", "targets", "shifted", "samples")
_LOGS = ("_metrics", "_total_train_tokens", "_stored_metrics", "accum_loss_components")
"""Where the trainers of TRL and sentence-transformers collect what they log."""


def units(kind: Kind) -> Units:
    """Return what counts the units of a mean."""
    return "samples" if kind == "samples" else lambda batch: _targets(batch, kind == "shifted")


def measure(trainer: Any, model: Any, micro: MicroBatch, num_items: Any) -> Kind | None:
    """Return what the loss is a mean over; None: no known kind. All ranks must call it.

    Args:
        trainer: the trainer, whose `compute_loss` returns losses without weights now.
        model: the model as the trainer calls it.
        micro: the first micro-batch.
        num_items: what the trainer passes as `num_items_in_batch`; None if it does not.

    Raises:
        TrainingError: the loss is finite on no rank.
    """
    model = getattr(model, "_orig_mod", model)  # not compiled for this
    logs = {name: copy.deepcopy(getattr(trainer, name)) for name in _LOGS if hasattr(trainer, name)}
    modes, random = [(one, one.training) for one in model.modules()], RandomState.now()
    model.eval()
    try:
        fits = _fits(trainer, model, micro, random, divides=num_items is not None)
    finally:
        for one, mode in modes:
            one.training = mode
        random.restore()
        vars(trainer).update(logs)
    rows = all_gather_rows(fits) if is_started() else [fits]
    known = [row.tolist() for row in rows if row[-1]]
    if not known:
        raise TrainingError.cannot(
            "weigh the losses of micro-batches",
            why="the loss of the first one is not finite",
            instead="check its data and labels",
        )
    return next((one for at, one in enumerate(KINDS) if all(row[at] for row in known)), None)


def _fits(
    trainer: Any, model: Any, micro: MicroBatch, random: RandomState, *, divides: bool
) -> Tensor:
    """Return a flag for each kind that fits this rank's samples, and whether they can tell."""
    whole, halves, counts = _halves(micro, trainer.stretto.run.loader)

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

    labels = whole.get("labels") if isinstance(whole, Mapping) else None
    has_targets = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim > 0
    items = _targets(whole, shifted=False) if has_targets else 1
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
            totals = {items, _targets(whole, shifted=True)} if has_targets else {items}
            is_own = any(_close(once * items, mean * total, tolerance) for total in totals)
            is_own = is_own and trainer.args.world_size > 1
            found["divided on its rank" if is_own else "divided"] = True
        divides = not _close(twice, once, 1e-5)
    if not divides:
        found["samples"] = _is_mean(mean, means, counts, tolerance)
        for kind in ("targets", "shifted") if has_targets else ():
            shares = [_targets(one, shifted=kind == "shifted") for one in halves]
            found[kind] = _is_mean(mean, means, shares, tolerance)
    return torch.tensor([*found.values(), is_known], dtype=torch.int64)


def _halves(micro: MicroBatch, loader: StepLoader) -> tuple[Any, list[Any], list[int]]:
    """Return some samples, both halves of them, and how many samples these have.

    If some labels are -100, the halves have different shares of targets. A batch of a stream that
    cannot be cut is its own half.
    """
    count = max(1, micro.num_samples)
    try:
        if count == 1:
            whole = join_samples([micro.batch, micro.batch], [1, 1])
        else:
            whole = take_samples(micro.batch, slice(0, 8), count)
        count = max(2, min(8, count))
        labels = whole.get("labels") if isinstance(whole, Mapping) else None
        if isinstance(labels, Tensor) and labels.ndim == 2 and (labels == IGNORED_LABEL).any():
            whole, labels = copy.copy(whole), labels.clone()
            is_target = labels[: count // 2] != IGNORED_LABEL
            later = is_target.flip(1).cumsum(1).flip(1) > 1
            labels[: count // 2][later] = IGNORED_LABEL  # all but the last target
            whole["labels"] = labels
        cuts = slice(0, count // 2), slice(count // 2, count)
        return (
            whole,
            [take_samples(whole, one, count) for one in cuts],
            [count // 2, count - count // 2],
        )
    except DataError:
        # Of samples in one row, or in rows of several kinds: collate the halves by themselves.
        num_samples = min(8, loader.spec.known_num_samples or 0) if loader.spec.is_map_style else 0
        if num_samples < 2:
            return micro.batch, [micro.batch], [count]
        parts = [*range(num_samples // 2)], [*range(num_samples // 2, num_samples)]
        halves = [loader.example_batch(one) for one in parts]
        return loader.example_batch([*parts[0], *parts[1]]), halves, [len(one) for one in parts]


def _targets(batch: Any, shifted: bool) -> int:
    labels = batch["labels"][..., 1:] if shifted else batch["labels"]
    return int(torch.count_nonzero(labels != IGNORED_LABEL))


def _is_mean(mean: float, parts: Sequence[float], counts: Sequence[int], tolerance: float) -> bool:
    pairs = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    return _close(mean * sum(counts), sum(part * count for part, count in pairs), tolerance)


def _close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
