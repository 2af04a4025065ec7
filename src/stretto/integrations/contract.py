"""Checks in the first step of several micro-batches, for loops and losses that are the user's."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.data import count_target_tokens
from stretto.data.containers import join_samples, opened, take_samples
from stretto.data.weights import Units
from stretto.errors import DataError
from stretto.integrations.shared import refuse
from stretto.run import Run
from stretto.runtime.gradients import all_sum, is_started
from stretto.runtime.loss_measure import only_looking, reduction_of, tolerance_for

_SUM = 2
"""`reduction="sum"`, as a function of torch notes it."""
_COPIES = frozenset({"ToCopyBackward0", "CloneBackward0", "AliasBackward0"})
_SHAPES = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0"})
Cut = tuple[Any, list[Any], list[int]]
"""A batch, its two parts, and how many samples these have; 0: it could not be cut."""


def cut_pair(pair: Sequence[tuple[Any, int]]) -> Cut:
    """Return two batches, given with their samples, as one; or else the larger one in halves."""
    batches, sizes = [batch for batch, _ in pair], [size for _, size in pair]
    if not all(_has_rows(batch, size) for batch, size in pair):
        return batches[0], [batches[0]] * 2, [0, 0]
    if len(pair) > 1 and all(sizes):
        with suppress(DataError):
            return join_samples(batches, sizes), batches, sizes
    whole, count = max(pair, key=lambda one: one[1])
    half = count // 2
    if half:
        with suppress(DataError):
            parts = [take_samples(whole, one, count) for one in (slice(half), slice(half, count))]
            return whole, parts, [half, count - half]
    return whole, [whole, whole], [0, 0]


def _has_rows(node: Any, num_samples: int) -> bool:
    """Return whether everything in a batch has a row for each sample; packed samples have not."""
    if isinstance(node, Tensor):
        return not node.ndim or len(node) == num_samples
    is_list = isinstance(node, list) and len(node) == num_samples
    container = None if is_list else opened(node)
    return container is None or all(_has_rows(one, num_samples) for one in container.items)


def check_mean(
    cut: Cut,
    loss_of: Callable[[Any], float],
    units: Callable[[Any], float] | None,
    tolerance: float,
) -> None:
    """Refuse a loss that is no mean over its units, from that of a batch and its parts.

    All ranks must call it.

    Args:
        cut: the batch and its parts.
        loss_of: returns the loss of a batch.
        units: counts the units of a batch; None: its samples.
        tolerance: relative rounding.

    Raises:
        TrainingError: it is none, on a rank.
    """
    whole, parts, sizes = cut
    losses = [loss_of(one) for one in (whole, *parts)]
    found = None
    if all(sizes):
        counts = sizes if units is None else [units(one) for one in parts]
        found = reduction_of(losses[0], losses[1:], counts, tolerance=tolerance)
    is_wrong = found not in ("mean", None)
    if is_started():
        is_wrong = all_sum([float(is_wrong)])[0] > 0
    name = "samples" if units is None else "its units"
    refuse(
        (
            is_wrong,
            "compute the loss in micro-batches",
            f"that of a batch is not the mean over {name} of those of its parts",
            "return a mean, and pass what it is over (units='tokens'), or have no micro-batches",
        )
    )


def check_module(
    trainer: Any, module: Any, pair: Sequence[tuple[Any, int]], units: Units, batch_idx: int
) -> None:
    """Refuse a loss of a Lightning module that is no mean over its units.

    Its `training_step` is computed on a copy of it that shares the parameters, without gradients,
    and that logs nothing. All ranks must call it.

    Args:
        trainer: the trainer.
        module: the module.
        pair: two micro-batches of a step as the module gets them, and their samples.
        units: what the loss is a mean over.
        batch_idx: the number of the second.

    Raises:
        TrainingError: it is none.
    """
    shared = (*module.parameters(), trainer, trainer.datamodule)
    try:
        other = copy.deepcopy(module, {id(one): one for one in shared})
    except Exception as error:  # noqa: BLE001  from attributes of the user
        warnings.warn(
            f"cannot check what the loss is a mean over, as the module cannot be copied: {error!r}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    other.log = other.log_dict = lambda *_, **__: None

    def loss_of(batch: Any) -> float:
        random.restore()
        arguments = trainer.fit_loop.epoch_loop._build_kwargs({}, batch, batch_idx).values()
        with trainer.precision_plugin.train_step_context():
            found = other.training_step(*arguments)
        found = found.get("loss") if isinstance(found, Mapping) else found
        return math.nan if found is None else float(found)

    counted = count_target_tokens if units == "tokens" else units
    is_coarse = "32" not in str(trainer.precision) and "64" not in str(trainer.precision)
    tolerance = tolerance_for(module.parameters(), is_coarse=is_coarse)
    with only_looking(other) as random:
        check_mean(
            cut_pair(pair), loss_of, None if counted == "samples" else counted, tolerance=tolerance
        )


def warn_of_batch_norm(*models: nn.Module) -> None:
    """Warn if statistics of a batch are those of a micro-batch."""
    if any(isinstance(one, _BatchNorm) and one.training for it in models for one in it.modules()):
        warnings.warn(
            "the model has BatchNorm, which normalizes by the statistics of each micro-batch, not "
            "of the batch; for others, use GroupNorm, or micro-batches as large as the batch",
            RuntimeWarning,
            stacklevel=2,
        )


@final
class FirstStep:
    """Follows the backward passes of one step of several micro-batches.

    Args:
        run: the run, bound.
    """

    def __init__(self, run: Run) -> None:
        self._groups = [group for one in run.optimizers for group in one.param_groups]
        self._passes, self._had_gradient = 0, False

    def begin(self) -> None:
        """Begin the step."""
        self._passes, self._had_gradient = 0, False

    def before_pass(self, loss: Tensor | None = None, num_samples: int = 0) -> None:
        """Refuse gradients that were cleared between micro-batches; see `check_graph`, too.

        Raises:
            TrainingError: they were.
        """
        if loss is not None and not self._passes:
            check_graph(loss, num_samples)
        is_cleared = self._had_gradient and not self._has_gradient()
        why = "zero_grad() clears that of the micro-batches before"
        instead = "call zero_grad() after optimizer.step(), not before the backward pass"
        refuse((is_cleared, "accumulate the gradient of a step", why, instead))

    def after_pass(self) -> None:
        """Note a backward pass."""
        self._passes, self._had_gradient = self._passes + 1, self._has_gradient()

    def end(self) -> None:
        """Refuse a step of which no backward pass was seen.

        Raises:
            TrainingError: it is such a one.
        """
        why = "the loop does not call accelerator.backward(loss)"
        instead = "write accelerator.backward(loss), not loss.backward()"
        refuse((not self._passes, "weigh the losses of micro-batches", why, instead))

    def _has_gradient(self) -> bool:
        return any(
            one.grad is not None and bool(one.grad.any())
            for group in self._groups
            for one in group["params"]
        )


def check_graph(loss: Tensor, num_samples: int) -> None:
    """Look in the graph of a loss for what cannot be weighed.

    Raises:
        TrainingError: it multiplies each sample with each, or is divided by a number at its end.
    """
    for node in _nodes(loss):
        refuse(
            (
                _compares(node, num_samples),
                "compute the loss in micro-batches",
                "it compares the samples of a batch with each other",
                "have micro-batches as large as the batch (micro_batch_size)",
            )
        )
    divisor = _divisor(loss)
    is_scaled = divisor is not None
    why = f"the loss is divided by {divisor}, and its share in the batch is set already"
    instead = f"remove that; or, if it is part of the loss, multiply it: loss * (1 / {divisor})"
    refuse((is_scaled, "weigh the losses of micro-batches", why, instead))


def _divisor(loss: Tensor) -> float | None:
    """Return the number that a loss is divided by at its end; None: none, or it makes a mean."""
    node: Any = loss.grad_fn
    while node is not None and (node.name() in _COPIES or _is_scaled(node)):
        node = next(one for one, _ in node.next_functions if one is not None)
    if node is None or node.name() != "DivBackward0" or node.next_functions[1][0] is not None:
        return None
    value, terms = node._saved_other, list(_terms(node.next_functions[0][0]))
    if value is None or value.numel() != 1 or any(map(_is_sum, terms)):
        return None
    found = float(value)
    # Divided by the number of its terms, it is a mean of several losses.
    return found if found.is_integer() and found not in (1, len(terms)) else None


def _is_scaled(node: Any) -> bool:
    """Return whether it multiplies by a number, such as a weight."""
    return node.name() == "MulBackward0" and any(one is None for one, _ in node.next_functions)


def _terms(node: Any) -> Iterator[Any]:
    """Yield the functions of the numbers that are added up in a loss."""
    if node is not None and node.name() in ("AddBackward0", "SubBackward0"):
        for one, _ in node.next_functions:
            yield from _terms(one)
    elif node is not None and node.name() in ("MulBackward0", "NegBackward0", "DivBackward0"):
        yield from _terms(node.next_functions[0][0])
    else:
        yield node


def _is_sum(node: Any) -> bool:
    is_reduced = getattr(node, "_saved_reduction", None) == _SUM
    return node is not None and (is_reduced or bool(node.name().startswith("Sum")))


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Yield the functions that a loss was computed with."""
    left, seen = [loss.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [one for one, _ in node.next_functions]


def _compares(node: Any, num_samples: int) -> bool:
    """Return whether it is the product of two matrices of activations, a row for each sample."""
    if node.name() not in ("MmBackward0", "BmmBackward0") or num_samples < 2:
        return False
    inputs = [one for one, _ in node.next_functions]
    if any(one is None or _is_parameter(one) for one in inputs):
        return False
    one, other = node._saved_self, node._saved_mat2
    rows, columns = int(one.shape[-2]), int(other.shape[-1])
    return math.prod(one.shape[:-2]) == 1 and rows == columns and rows % num_samples == 0


def _is_parameter(node: Any) -> bool:
    while node.name() in _COPIES | _SHAPES:
        node = node.next_functions[0][0]
    name: str = node.name()
    return name.endswith("AccumulateGrad")
