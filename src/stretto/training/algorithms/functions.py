"""The algorithms as functions, without a clock: the callbacks call them when they are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stretto.data import count_samples
from stretto.data.containers import mapped, nodes
from stretto.data.tokens import longest_sequence, not_cut_alike
from stretto.errors import TrainingError, shown
from stretto.runtime.compiled import plain_naming


def freeze(model: nn.Module, layers: Sequence[str], part: float = 1.0) -> list[nn.Parameter]:
    """Stop the first layers of a model from learning.

    A layer without which nothing would be left to learn goes on. On several ranks under DDP, all
    gradients must take part in the averaging: set those of the layers to None before the update
    instead, as `LayerFreezing` does.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    >>> stopped = freeze(model, ["0", "1"], 0.5)
    >>> [name for name, one in model.named_parameters() if not one.requires_grad]
    ['0.weight', '0.bias']

    Args:
        model: the model.
        layers: names of modules as in `model.named_modules()`, first to freeze first.
        part: the part of the layers that is frozen, from 0 to 1.

    Returns:
        The parameters that were stopped; set their `requires_grad` to let them learn again.

    Raises:
        TrainingError: the model has no module of a name, or `part` is not from 0 to 1.
    """
    if not 0 <= part <= 1:
        raise TrainingError.bad("part", part, "it is not from 0 to 1", "write a part such as 0.5")
    stopped = list[nn.Parameter]()
    for module in find_modules(model, layers, "freeze")[: num_of(part, layers)]:
        own = [one for one in module.parameters() if one.requires_grad]
        inside = {id(parameter) for parameter in own}
        if any(one.requires_grad and id(one) not in inside for one in model.parameters()):
            stopped += own
            module.requires_grad_(requires_grad=False)
    return stopped


def num_of(part: float, layers: Sequence[object]) -> int:
    """Return how many layers a part of them is, rounded down.

    >>> num_of(0.3, range(10))
    3
    """
    return math.floor(part * len(layers) + 1e-9)  # 0.3 * 10 is 2.9999999999999996


Count: TypeAlias = Callable[[Any], int | None] | None


def truncate(batch: Any, length: int, *, count: Count = None, looks_at_values: bool = True) -> Any:
    """Cut every sequence of a batch to a length.

    >>> truncate({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}, 2)
    {'input_ids': tensor([[1, 2],
            [4, 5]])}

    Args:
        batch: a batch of sequences, padded on the right. It is not modified.
        length: the most tokens of a sequence.
        count: counts the samples of a batch, if a row may have several: those are not cut.
        looks_at_values: whether to look for padding and targets, which reads tensors, and not only
            at shapes.

    Raises:
        TrainingError: the loss would mean something else: something in the batch is not cut alike,
            it is packed or padded on the left, or all targets of a sample are cut off.
    """
    if (longest_sequence(batch) or 0) <= length:
        return batch
    wrong: str | None = "none would be left"
    if length >= 1:
        wrong = not_cut_alike(batch, length, looks_at_values=looks_at_values)
    if count is not None and count(batch) not in (None, count_samples(batch)):
        wrong = "it is packed, so whole samples would be cut off"
    if wrong is not None:
        instead = "cut them in the data set or in collate_fn"
        what = f"cut the sequences of a batch to {length} tokens"
        raise TrainingError.cannot(what, why=wrong, instead=instead)
    return mapped(lambda one: one[:, :length] if one.dim() > 1 else one, batch)


def select(batch: Any, losses: Tensor, keep: float = 0.5) -> Any:
    """Keep part of the samples of a batch, those of larger loss more often.

    They are drawn without replacement, each with a chance proportional to its rank's percentile to
    the power `1 / keep` (Jiang et al. 2019, arXiv 1910.00762, section 3).

    >>> select(torch.arange(8), torch.arange(8.0), keep=0.25).shape
    torch.Size([2])

    Args:
        batch: a batch of n samples. It is not modified.
        losses: the loss of each sample, shape [n].
        keep: the part of the samples that is kept, above 0 and at most 1.

    Raises:
        TrainingError: `keep` is out of range, or these are not the losses of the samples.
    """
    if not 0 < keep <= 1:
        raise TrainingError.bad("keep", keep, "it is not in (0, 1]", "write a part such as 0.5")
    counts = {len(one) for one in nodes(batch) if isinstance(one, Tensor) and one.dim()}
    if losses.dim() != 1 or len(losses) not in counts:
        why, instead = "no tensor of the batch has as many samples", "return losses of shape [n]"
        raise TrainingError.bad("losses", list(losses.shape), why, instead)
    count = len(losses)
    percentile = (losses.argsort().argsort() + 1) / count
    chosen = torch.multinomial(percentile ** (1 / keep), max(1, round(keep * count))).sort().values
    return mapped(lambda one: one[chosen] if one.dim() and len(one) == count else one, batch)


def drop_layers(
    model: nn.Module, blocks: Sequence[str], rate: float | Callable[[], float]
) -> Callable[[], None]:
    """Leave out whole residual blocks of a model in training, the deeper the more often.

    Block l of L is left out of a training pass with probability `rate * l / L`, and its residual
    branch is divided by the probability that it is there, so evaluation needs no change (Huang et
    al. 2016, arXiv 1603.09382, section 3, with the division moved to training).

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> restore = drop_layers(model, ["0", "1"], rate=0.2)
    >>> model(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    >>> restore()

    Args:
        model: the model.
        blocks: names of modules whose output has the shape of their input, first block first.
        rate: how often the deepest one is left out; or a function that is asked in each pass.

    Returns:
        A function that gives every block its own forward pass back.

    Raises:
        TrainingError: the model has no module of a name, or the rate is not from 0 to below 1.
    """
    if not callable(rate) and not 0 <= rate < 1:
        raise TrainingError.bad("rate", rate, "it is not in [0, 1)", "write a rate such as 0.2")
    found = find_modules(model, blocks, "leave out")
    now = rate if callable(rate) else lambda: rate
    undo = ExitStack()
    for depth, one in enumerate(found, start=1):
        undo.callback(_lottery(one, now, depth / len(found)))
    return undo.close


def _lottery(module: nn.Module, rate: Callable[[], float], depth: float) -> Callable[[], None]:
    own, forward = vars(module).get("forward"), module.forward

    def sometimes(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        left_out = rate() * depth
        if not module.training or left_out == 0:
            return forward(hidden, *args, **kwargs)
        if torch.rand(()) < left_out:
            # Keeps its parameters in the graph, as averaging over ranks expects.
            return hidden + 0 * sum(parameter.sum() for parameter in module.parameters())
        return hidden + (forward(hidden, *args, **kwargs) - hidden) / (1 - left_out)

    module.forward = sometimes
    if own is None:
        return partial(delattr, module, "forward")  # its class has one
    return partial(setattr, module, "forward", own)


def find_modules(model: nn.Module, names: Sequence[str], what: str) -> list[nn.Module]:
    """Return the modules of `model` that have these names; `what` says what for.

    >>> find_modules(nn.Sequential(nn.Identity()), ["0"], "freeze")
    [Identity()]

    Raises:
        TrainingError: the model has no module of a name.
    """
    modules, plain = dict(model.named_modules()), plain_naming(model)
    for name, module in tuple(modules.items()):
        modules.setdefault(plain(name), module)
    known = list(modules)[1:]
    for name in names:
        if name not in modules:
            instead = f"write one of {shown(known)}" if known else "leave it out: it has none"
            why = "the model has no such module"
            raise TrainingError.cannot(f"{what} {name!r}", why=why, instead=instead)
    return [modules[name] for name in names]
