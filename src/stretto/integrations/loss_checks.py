"""Checks that the losses of micro-batches may be weighed, for loops and losses of the user's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, final

from torch import Tensor, nn

from stretto.data import count_target_tokens
from stretto.data.containers import join_samples, opened, take_samples
from stretto.data.weights import Units
from stretto.errors import DataError
from stretto.integrations.shared import refuse
from stretto.run import BATCH_NORMS, Run
from stretto.runtime.losses import MEAN, SUM, Reduction, nodes, reduction_of

WEIGH = "weigh the losses of micro-batches"
"""What is refused if it is not known, or not a mean, what a loss is over."""
_SAME = frozenset({"ToCopyBackward0", "CloneBackward0", "AliasBackward0", "NegBackward0"})
_LAYERS = ("Mm", "Addmm", "Bmm", "Convolution", "Embedding")
"""Functions of torch that take data."""


def keeps(
    reduction: Reduction,
    pair: Sequence[tuple[Any, int]],
    loss_of: Callable[[Any], float],
    units: Units,
    tolerance: float,
) -> bool:
    """Return whether the loss of a batch is the mean, or sum, of those of its parts.

    Also if that cannot be seen from this batch. `loss_of` is called three times in any case, as
    ranks may meet in it.

    Args:
        reduction: what it should be over its units.
        pair: two micro-batches and their samples, compared with both as one; of one, or of two that
            cannot be joined, the larger is compared with its halves.
        loss_of: returns the loss of a batch.
        units: what it is a mean over.
        tolerance: relative rounding.
    """
    whole, parts, sizes = _cut(pair)
    first, *losses = [loss_of(batch) for batch in (whole, *parts)]
    if not all(sizes):
        return True
    count = count_target_tokens if units == "tokens" else units
    counts = sizes if count == "samples" else [count(part) for part in parts]
    return reduction_of(first, losses, counts, tolerance=tolerance) in (reduction, None)


def _cut(pair: Sequence[tuple[Any, int]]) -> tuple[Any, list[Any], list[int]]:
    """Return a batch, its two parts, and their samples; 0: it could not be cut."""
    batches, sizes = [batch for batch, _ in pair], [size for _, size in pair]
    whole, count = max(pair, key=lambda each: each[1])
    half = count // 2
    if all(_has_rows(batch, size) for batch, size in pair):
        with suppress(DataError):
            if len(pair) > 1 and all(sizes):
                return join_samples(batches, sizes), batches, sizes
        with suppress(DataError):
            if half:
                cuts = slice(half), slice(half, count)
                halves = [take_samples(whole, cut, count) for cut in cuts]
                return whole, halves, [half, count - half]
    return whole, [whole, whole], [0, 0]


def _has_rows(node: Any, num_samples: int) -> bool:
    """Return whether everything in a batch has a row for each sample; packed samples have not."""
    if isinstance(node, Tensor):
        return not node.ndim or len(node) == num_samples
    is_list = isinstance(node, list) and len(node) == num_samples
    container = None if is_list else opened(node)
    return container is None or all(_has_rows(item, num_samples) for item in container.items)


def warn_of_batch_norm(*models: nn.Module) -> None:
    """Warn if statistics of a batch are those of a micro-batch."""
    layers = chain.from_iterable(model.modules() for model in models)
    if any(isinstance(layer, BATCH_NORMS) and layer.training for layer in layers):
        said = "BatchNorm normalizes by the statistics of each micro-batch, not of the batch"
        warnings.warn(f"{said}; use GroupNorm instead", RuntimeWarning, stacklevel=2)


@final
class FirstStep:
    """Follows the backward passes of one step of several micro-batches.

    Args:
        run: the run, bound.
        is_counted: whether a function of the user counts what the loss is a mean over.
    """

    def __init__(self, run: Run, *, is_counted: bool = False) -> None:
        self._is_counted = is_counted
        self._run = run
        self._passes, self._had_gradient = 0, False

    def before_pass(self, loss: Tensor, num_samples: int, weight: float = 1.0) -> None:
        """Refuse gradients that were cleared between micro-batches; see `check_graph`, too.

        Args:
            loss: the loss of a micro-batch.
            num_samples: its samples.
            weight: what the loop has multiplied it by.

        Raises:
            TrainingError: they were.
        """
        if not self._passes and weight:
            check_graph(loss, num_samples, weight, is_counted=self._is_counted)
        is_cleared = self._had_gradient and not has_gradient(self._run)
        why = "zero_grad() clears that of the micro-batches before"
        instead = "call zero_grad() after optimizer.step(), not before the backward pass"
        refuse((is_cleared, "accumulate the gradient of a step", why, instead))

    def after_pass(self) -> None:
        """Note a backward pass."""
        self._passes, self._had_gradient = self._passes + 1, has_gradient(self._run)

    def end(self) -> None:
        """Refuse a step of which no backward pass was seen.

        Raises:
            TrainingError: it is such a one.
        """
        instead = "write accelerator.backward(loss)"
        refuse((not self._passes, WEIGH, "the loop calls another backward", instead))


def has_gradient(run: Run) -> bool:
    """Return whether what the optimizers of a run change has a gradient that is not zero."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in run.optimizers)
    gradients = (parameter.grad for group in groups for parameter in group["params"])
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def check_graph(loss: Tensor, num_samples: int, weight: float, *, is_counted: bool) -> None:
    """Look in the graph of a loss for what cannot be weighed.

    Args:
        loss: the loss of a micro-batch.
        num_samples: its samples.
        weight: what the loop has multiplied it by.
        is_counted: whether a function of the user counts what the loss is a mean over.

    Raises:
        TrainingError: it multiplies each sample with each, is divided by the weights of its
            classes or by a number at its end, or is a sum.
    """
    what = "compute the loss in micro-batches"
    by_class = "it is divided by the weights of the classes in the micro-batch"
    mean = "pass units=, a function that adds up these weights; or reduction='none' and .mean()"
    whole = "have micro-batches as large as the batch (micro_batch_size)"
    for node in nodes(loss.grad_fn):
        is_nll = node.name().startswith("NllLoss") and node._saved_reduction == MEAN
        is_weighted = is_nll and node._saved_weight is not None and not is_counted
        refuse(
            (_compares(node, num_samples), what, "it compares the samples with each other", whole),
            (is_weighted, what, by_class, mean),
        )
    terms = _terms(loss.grad_fn)
    is_sum, divisors = False, set[float]()
    for node, scale, divisor in terms:
        if _reads_data(node):
            num_added = _num_added(node)
            is_sum = is_sum or (num_added > 0 and scale * num_samples > 1.001 * weight)
            is_mean = getattr(node, "_saved_reduction", None) == MEAN
            is_mean = is_mean or node.name().startswith("MeanBackward")
            if is_mean or (not is_counted and 0 < num_added < divisor):
                divisors.add(divisor)
    divisor = divisors.pop() if len(divisors) == 1 else 1.0
    is_scaled = divisor.is_integer() and divisor not in (1, len(terms))
    of_sum = "return a mean: divide it by what it is over, such as len(batch)"
    instead = f"remove that; or, if it is part of the loss, multiply it: loss * (1 / {divisor})"
    refuse(
        (num_samples > 1 and is_sum, WEIGH, "the loss is a sum over the samples", of_sum),
        (is_scaled, WEIGH, f"it is divided by {divisor}, which the adapter has done", instead),
    )


def _terms(node: Any) -> list[tuple[Any, float, float]]:
    """Return the functions that a loss adds up, the factor and the divisor of each.

    The factor is 0 if there is a divisor.
    """
    left, found = [(node, 1.0, 1.0)], list[tuple[Any, float, float]]()
    while left:
        node, scale, divisor = left.pop()
        if node is None:
            continue
        name = node.name()
        inputs = [before for before, _ in node.next_functions if before is not None]
        is_scaled = name in ("DivBackward0", "MulBackward0") and len(inputs) == 1
        if name in ("AddBackward0", "SubBackward0"):
            left += [(before, scale, divisor) for before in inputs]
        elif name in _SAME or is_scaled:
            number = 1.0
            if is_scaled:
                is_first = node.next_functions[0][0] is not None
                saved = node._saved_other if is_first else node._saved_self
                number = float(saved) if saved is not None and saved.numel() == 1 else math.nan
            is_divided = name == "DivBackward0"
            scale = 0.0 if is_divided else scale * abs(number)
            left.append((inputs[0], scale, divisor * number if is_divided else divisor))
        else:
            found.append((node, scale, divisor))
    return found


def _num_added(node: Any) -> float:
    """Return how many numbers a function adds up; 0: it is no sum."""
    if node.name() == "SumBackward0":
        return float(math.prod(node._saved_self_sym_sizes))
    is_sum = getattr(node, "_saved_reduction", None) == SUM
    return float(node._saved_target.numel()) if is_sum else 0


def _compares(node: Any, num_samples: int) -> bool:
    """Return whether it has a row and a column for each sample."""
    if num_samples < 2 or not node.name().startswith(("Mm", "Bmm", "Cdist", "EuclideanDist")):
        return False
    *more, rows, columns = node._input_metadata[0].shape
    is_square = math.prod(more) == 1 and rows == columns and rows % num_samples == 0
    return is_square and all(_reads_data(before) for before, _ in node.next_functions)


def _reads_data(node: Any) -> bool:
    """Return whether it is a function of data, and not of parameters alone."""
    return any(
        layer.name().startswith("Embedding") or None in dict(layer.next_functions)
        for layer in nodes(node)
        if layer.name().startswith(_LAYERS)
    )
