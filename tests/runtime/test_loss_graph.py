"""Which losses are known from their graphs to be means over samples: a zoo, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.runtime import loss_zoo as zoo
from torch import Tensor, nn

from stretto.runtime.losses import Doubt, MeanCheck

PARAMETERS = [
    parameter
    for one in vars(zoo).values()
    for parameter in (one.parameters() if isinstance(one, nn.Module) else [one])
    if isinstance(parameter, nn.Parameter) and parameter.requires_grad
]


def gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return torch.cat([one.flatten() for one in found])


def is_mean(loss: zoo.Loss, sizes: Sequence[int], parameters: Sequence[Tensor]) -> bool:
    """Return whether the gradients of parts of a batch add up to that of the batch."""
    parts = [zoo.batch_of(size, seed=at) for at, size in enumerate(sizes)]
    whole = tuple(map(torch.cat, zip(*parts, strict=True)))
    pairs = zip(sizes, parts, strict=True)
    added = sum(size * gradient(loss(part), parameters) for size, part in pairs)
    expected = gradient(loss(whole), parameters)
    return bool((added / sum(sizes) - expected).abs().max() <= 1e-9 * expected.abs().max())


def doubt_of(loss: zoo.Loss, sizes: Sequence[int], steps: int = 4) -> Doubt | None:
    """Return the first doubt in some steps of micro-batches of these sizes."""
    check = MeanCheck("say it")
    for step in range(steps):
        check.begin(len(sizes))
        for at, size in enumerate(sizes):
            found = loss(zoo.batch_of(size, seed=100 * step + at))
            last = {"is_last": at == len(sizes) - 1, "accumulation": sum(sizes) / size}
            doubt = check.look(found, size, size, **last)
            if doubt is not None:
                return doubt
    return None


@pytest.mark.parametrize("name", zoo.RIGHT)
def test_means_over_samples_are_known(name: str) -> None:
    loss = zoo.RIGHT[name]
    assert is_mean(loss, (8, 3, 5), PARAMETERS)
    for sizes in ((4, 4, 4, 4), (3, 3, 2), (5, 5, 5)):
        assert doubt_of(loss, sizes) is None


@pytest.mark.parametrize("name", zoo.WRONG)
def test_other_losses_are_doubted(name: str) -> None:
    loss = zoo.WRONG[name]
    assert not is_mean(loss, (8, 3, 5), PARAMETERS)
    for sizes in ((4, 4, 4, 4), (3, 3, 2), (2, 2)):
        doubt = doubt_of(loss, sizes)
        assert doubt is not None
        assert "say it" in doubt.instead or "mean" in doubt.instead
