"""What the loss of a trainer is a mean over, measured first and checked later.

Whether a loss is divided by `num_items_in_batch` does not follow from any signature: BERT accepts
it among its `**kwargs` and returns a mean all the same. So the loss of a few samples is computed
without gradients: with `num_items_in_batch`, with twice as many, and for each half of the samples.
By chance, other losses look alike on a few samples (that of DETR, if both halves have as many
boxes). So steps 1, 2, 4, 8, ... of several micro-batches are measured on two of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from stretto.data import MicroBatch
from stretto.data.containers import join_samples, take_samples
from stretto.data.tokens import IGNORED_LABEL
from stretto.data.weights import Units
from stretto.errors import DataError
from stretto.integrations.loss_checks import WEIGH, keeps
from stretto.integrations.shared import refuse
from stretto.run import Run
from stretto.runtime.losses import Reduction, is_close, only_looking, tolerance_for
from stretto.runtime.random_state import RandomState

LossKind: TypeAlias = Literal["divided", "divided on its rank", "targets", "shifted", "samples"]
"""`divided`: by `num_items_in_batch`, times the number of ranks, as transformers does it; `divided
on its rank`: without that factor. The others are means: over labels that are not -100, over these
without the first of each sequence, and over samples."""
LOSS_KINDS: Sequence[LossKind] = get_args(LossKind)
_LOGS = ("_metrics", "_total_train_tokens", "_stored_metrics", "accum_loss_components")
"""Where the trainers of TRL and sentence-transformers collect what they log."""
_LOOKS = ((True, False), (True, True), (False, False))
"""Whether a look is in the mode of training, and whether it is the second."""


def units(kind: LossKind, ignored: int) -> Units:
    """Return what counts the units of a mean; see `ignored_pixel`."""
    return "samples" if kind == "samples" else lambda one: _targets(one, ignored, kind == "shifted")


def ignored_pixel(model: Any) -> int:
    """Return the class of the pixels that the loss of a segmentation model ignores."""
    config = getattr(model, "config", None)
    return getattr(config, "semantic_loss_ignore_index", IGNORED_LABEL)


def measure(
    trainer: Any, model: Any, micros: Sequence[MicroBatch], num_items: Any
) -> tuple[LossKind | None, LossKind | None]:
    """Return what the loss is a mean over, and what counts the number that it is divided by.

    None: no known kind; and the number of the trainer. All ranks must call it.

    Args:
        trainer: the trainer, whose `compute_loss` returns losses without weights now.
        model: the model as the trainer calls it.
        micros: the micro-batches of the first step.
        num_items: what the trainer passes as `num_items_in_batch`; None if it does not.

    Raises:
        TrainingError: the loss is finite on no rank.
    """
    ranks, kind, is_half, is_random = trainer.stretto.run.loader.ranks, None, True, True
    for is_training, is_second in _LOOKS:
        # A second look, at other samples, for losses that are rounded; another in eval mode for
        # those that are random in training.
        if (is_second and not is_half) or (not is_training and not is_random):
            continue
        with _looking(trainer, model, is_training=is_training) as look:
            fits = _fits(trainer, look, micros, num_items, is_second=is_second)
            rows = ranks.gather(fits)
            known = [row for row in rows if row[-1]]
            why = "that of the first batch is not finite"
            refuse((not known, WEIGH, why, "check data and labels"))
            *kinds, targets, shifted = [
                all(row[at] for row in known) for at in range(len(fits) - 2)
            ]
            kind = next((one for one, fits in zip(LOSS_KINDS, kinds, strict=True) if fits), None)
            if kind is not None:
                break
            is_half = any(row[-2] for row in rows)
            is_random = any(ranks.gather(look.is_random(micros[0].batch, num_items)))
    return kind, "targets" if targets else "shifted" if shifted else None


def keeps_kind(trainer: Any, model: Any, micros: Sequence[MicroBatch], num_items: Any) -> bool:
    """Return whether the micro-batches of a step have the loss that was measured before.

    All ranks must call it. Two micro-batches are compared with both as one, or the first of them
    with its halves. Each pair takes three passes, as those of a model on several ranks must meet.
    """
    kind = trainer.stretto.kind
    is_divided = kind in ("divided", "divided on its rank")
    counted = units("samples" if is_divided else kind, ignored_pixel(trainer.model))
    reduction: Reduction = "sum" if is_divided else "mean"
    number = num_items if is_divided else None
    pairs = [
        [(micro.batch, micro.num_samples) for micro in micros[start : start + 2]]
        for start in range(0, len(micros), 2)
    ]

    def verdict(look: _Look, *, is_second: bool) -> list[int]:
        options = {"is_second": is_second}
        kept = [
            keeps(
                reduction, pair, lambda one: look(one, number), counted, look.tolerance, **options
            )
            for pair in pairs
        ]
        is_random = is_second and look.is_random(pairs[0][0][0], number)
        return [kept.count(False), is_random, look.tolerance() > 3e-3]

    for is_training, is_second in _LOOKS:
        with _looking(trainer, model, is_training=is_training) as look:
            found = verdict(look, is_second=is_second)
        wrong, is_random, is_rounded = trainer.stretto.run.loader.ranks.agree(found)
        if not is_second and not wrong:
            return True
        if is_second and not is_random:  # a loss that is not rounded was wrong at the first look
            return bool(is_rounded) and not wrong
    return False


def tried(compute: Callable[[], Any]) -> Any:
    """Return what a function returns without gradients; with them if it needs them."""
    try:
        return compute()
    except Exception:  # noqa: BLE001  such as one that computes a penalty on a gradient
        with torch.enable_grad():
            return compute()


@final
class _Look:
    """Returns losses that are computed beside the run."""

    def __init__(self, trainer: Any, model: Any, random: RandomState) -> None:
        self._trainer, self._model, self._random = trainer, model, random
        self._loss: Tensor | None = None

    def __call__(self, batch: Any, num_items: Any, *, seed: int | None = None) -> float:
        """Return the loss of a batch."""
        trainer = self._trainer
        self._random.restore()
        if seed is not None:
            torch.manual_seed(seed)
        inputs = trainer._prepare_inputs(copy.copy(batch))
        if num_items is not None:
            num_items = torch.as_tensor(num_items, device=trainer.args.device)
        options = {"num_items_in_batch": num_items}
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self._model, inputs, **options)
        self._loss = loss.detach()
        return float(self._loss.mean())

    def tolerance(self) -> float:
        """Return the relative rounding of the losses."""
        args = self._trainer.args
        is_coarse = bool(args.bf16 or args.fp16 or args.tf32)
        return tolerance_for(self._model.parameters(), is_coarse=is_coarse, loss=self._loss)

    def is_random(self, batch: Any, num_items: Any) -> bool:
        """Return whether the loss of a batch depends on the random state."""
        once, again = self(batch, num_items), self(batch, num_items, seed=1)
        return not is_close(once, again, self.tolerance())


@contextmanager
def _looking(trainer: Any, model: Any, *, is_training: bool) -> Iterator[_Look]:
    """While open, nothing that is computed is noted; yield what returns a loss."""
    model = getattr(model, "_orig_mod", model)  # not compiled for this
    logs = {name: copy.deepcopy(getattr(trainer, name)) for name in _LOGS if hasattr(trainer, name)}
    with only_looking(model, is_training=is_training) as random:
        try:
            yield _Look(trainer, model, random)
        finally:
            vars(trainer).update(logs)


def _fits(
    trainer: Any, at: _Look, micros: Sequence[MicroBatch], num_items: Any, *, is_second: bool
) -> list[bool]:
    """Return flags for samples of this rank.

    A kind fits; a count is the divisor; the loss is in half precision; they can tell.
    """
    ignored, divides = ignored_pixel(trainer.model), num_items is not None
    whole, halves, counts = _halves(micros, trainer.stretto.run, ignored, is_second=is_second)

    def mean_of(batch: Any) -> float:
        try:
            return float(at(batch, None))
        except Exception:
            if not divides:
                raise
            return math.nan  # it always needs the number

    labels, items = _classes(whole), _targets(whole, ignored)
    # Only sequences of labels can be shifted.
    both: tuple[tuple[LossKind, bool], ...] = (("targets", False), ("shifted", True))
    kinds = both[: 0 if labels is None else labels.ndim]
    mean, means = mean_of(whole), [mean_of(one) for one in halves]
    world_size = trainer.args.world_size
    tolerance = at.tolerance()
    found, is_known = dict.fromkeys(LOSS_KINDS, False), math.isfinite(mean)
    divisors = [False, False]
    if divides:
        once, twice = at(whole, items), at(whole, 2 * items)
        parts = sum(at(one, items) for one in halves)
        is_known, tolerance = math.isfinite(once), at.tolerance()
        exact = max(1e-5, tolerance if tolerance > 3e-3 else 0.0)  # of a loss in half precision
        if is_close(2 * twice, once, exact) and is_close(parts, once, tolerance):
            totals = [_targets(whole, ignored, is_shifted) for _, is_shifted in kinds] or [1]
            own, shared = (
                [is_close(once * items, mean * factor * count, tolerance) for count in totals]
                for factor in (1, world_size)
            )
            is_own = any(own) and world_size > 1
            found["divided on its rank" if is_own else "divided"] = True
            divisors = [*(own if is_own else shared), False][:2] if kinds else [False, False]
        divides = not is_close(twice, once, exact)
    if not divides:
        found["samples"] = _has_mean_over(mean, means, counts, tolerance)
        for kind, is_shifted in kinds:
            shares = [_targets(one, ignored, is_shifted) for one in halves]
            found[kind] = _has_mean_over(mean, means, shares, tolerance)
    return [*found.values(), *divisors, tolerance > 3e-3, is_known]


def _halves(
    micros: Sequence[MicroBatch], run: Run, ignored: int, *, is_second: bool
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
        others = ordered[most:-most]
        ordered = others if is_second and len(others) >= 2 * most else ordered
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


def _has_mean_over(
    mean: float, parts: Sequence[float], counts: Sequence[int], tolerance: float
) -> bool:
    pairs = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    return is_close(mean * sum(counts), sum(part * count for part, count in pairs), tolerance)
