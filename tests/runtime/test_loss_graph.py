"""Which losses are known from their graphs to be means over samples: a zoo, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
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
            is_last, steps_per_update = at == len(sizes) - 1, sum(sizes) / size
            doubt = check.look(found, size, size, is_last=is_last, accumulation=steps_per_update)
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


# Random losses: a quantity of each sample, what is done with it, and how it is reduced.

LAYERS = {
    "linear": lambda b: zoo.net(b[0]),
    "deep": lambda b: zoo.deep(b[0]),
    "tokens": lambda b: zoo.per_token(zoo.tokens(b)),
    "sequence": lambda b: zoo.block(zoo.tokens(b)).exp(),
    "convolved": lambda b: zoo.conv(b[0][:, None]),
}
OF_EACH: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "error": lambda out, b: (out - 0.3).square(),
    "softmax": lambda out, b: out.log_softmax(-1),
    "masked": lambda out, b: out.square().masked_fill(out > 0.5, 0.0),
    "scaled": lambda out, b: 0.5 * out.exp() / 3,
    "weighted": lambda out, b: out.square() * b[2][:, :1].exp().reshape(-1, *[1] * (out.dim() - 1)),
    "normalized": lambda out, b: nn.functional.normalize(out, dim=-1) + 0.1 * out,
    "largest": lambda out, b: out.square().amax(-1, keepdim=True),
    "flipped": lambda out, b: out.square() * out.flip(-1).tanh(),
    "product": lambda out, b: torch.einsum("n...i,n...j->n...ij", out, out.tanh()),
}
MIXED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "softmax over samples": lambda out, b: out.softmax(0) * out,
    "weights over their mean": lambda out, b: (
        out.square()
        * (b[2][:, 0].exp() / b[2][:, 0].exp().mean()).reshape(-1, *[1] * (out.dim() - 1))
    ),
    "centred": lambda out, b: (out - out.mean(0)).square(),
    "standardized": lambda out, b: (out / out.std(0)).exp(),
    "next sample": lambda out, b: out * out.roll(1, 0),
    "cumulated": lambda out, b: out.cumsum(0).square(),
    "gram": lambda out, b: out.flatten(1) @ out.flatten(1).T + 0.1,
    "hardest": lambda out, b: out.flatten(1).square().sum(1).topk(2).values,
    "selected": lambda out, b: out.square()[b[2][:, 0] > -0.5],
}
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda each: each.mean(),
    "mean of sums": lambda each: each.flatten(1).sum(1).mean(),
    "means of dimensions": lambda each: each.mean(0).sum(),
    "sum over len": lambda each: each.sum() / len(each),
    "sum over numel": lambda each: each.sum() / each.numel(),
    "mean of roots": lambda each: each.flatten(1).square().mean(1).add(1).sqrt().mean(),
    "one by one": lambda each: torch.stack([one.mean() for one in each]).mean(),
}
MISREDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda each: each.sum(),
    "root": lambda each: each.square().mean().add(0.1).sqrt(),
    "max": lambda each: each.max(),
    "log-sum-exp": lambda each: each.flatten(1).mean(1).logsumexp(0),
    "variance": lambda each: each.flatten(1).mean(1).var(),
    "square": lambda each: (each.mean() + 0.5).square(),
    "norm": lambda each: each.norm(),
    "all but one": lambda each: each[1:].mean(),
    "of a constant": lambda each: each.sum() / 7,
}


class Term(NamedTuple):
    """A term of a loss, by the names of what it does."""

    layer: str
    steps: Sequence[str]
    mixed: str | None
    reduced: str
    scale: float

    def __call__(self, batch: Any) -> Tensor:
        out = LAYERS[self.layer](batch)
        for step in self.steps:
            out = OF_EACH[step](out, batch)
        out = out if self.mixed is None else MIXED[self.mixed](out, batch)
        return self.scale * (REDUCED | MISREDUCED)[self.reduced](out)


@st.composite
def terms(draw: st.DrawFn) -> list[Term]:
    """Terms of a loss; in every other loss, one of them is no mean over samples."""
    found, odd = list[Term](), draw(st.integers(0, 5))
    for at in range(draw(st.integers(1, 3))):
        steps = draw(st.lists(st.sampled_from(sorted(OF_EACH)), max_size=2, unique=True))
        mixed = draw(st.sampled_from(sorted(MIXED))) if at == odd and draw(st.booleans()) else None
        reduced = sorted(MISREDUCED if at == odd and mixed is None else REDUCED)
        by, scale = draw(st.sampled_from(reduced)), draw(st.sampled_from([1.0, 0.1, 2.0]))
        found.append(Term(draw(st.sampled_from(sorted(LAYERS))), steps, mixed, by, scale))
    return found


@settings(max_examples=60, deadline=None)
@given(terms())
def test_what_is_known_is_a_mean_and_means_are_known(made: list[Term]) -> None:
    """Against the gradients of batches and their parts: no wrong loss is known, all right ones."""

    def loss(batch: Any) -> Tensor:
        return torch.stack([one(batch) for one in made]).sum()

    assume(gradient(loss(zoo.batch_of(5)), PARAMETERS).norm() > 1e-9)
    truth = all(is_mean(loss, sizes, PARAMETERS) for sizes in ((4, 6), (5, 5, 5)))
    assert (doubt_of(loss, (5, 5, 5), steps=1) is None) == truth
