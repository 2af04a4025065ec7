"""A step that is done again is the step that would have been."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from stretto.runtime.random_state import RandomState
from stretto.runtime.rewind import Rewind


def draws() -> list[float]:
    # The legacy generator of NumPy is what libraries draw from.
    return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002


def test_all_chance_is_put_back() -> None:
    state = RandomState.now()
    first = draws()
    state.restore()
    assert draws() == first
    state.restore()
    assert draws() == first


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1)),
    )


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_step_that_is_done_again_is_the_same_to_the_last_bit() -> None:
    model, batch = make_model(), torch.randn(6, 4)
    rewind = Rewind(model)
    for _ in range(3):
        rewind.save()
        first = gradients(model, batch)
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for _ in range(2):
            gradients(model, batch[:3])  # what failed had drawn and counted already
            rewind.restore()
        again = gradients(model, batch)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer, and writes to a large one now and then."""

    average: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("mask", torch.ones(1 << 21, dtype=torch.bool), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor, *, writes: bool = False) -> Tensor:
        self.average = self.average + x
        if writes:
            self.mask[0] = False
        return self.average


def test_buffers_that_are_replaced() -> None:
    model = Replacing()
    before = model.average
    rewind = Rewind(model)
    rewind.save()
    model(torch.ones(2))
    rewind.restore()
    assert model.average is before
    assert model.average.tolist() == [0, 0]
    model(torch.ones(2))
    rewind.save()
    kept = model.average
    model(torch.ones(2))
    rewind.restore()
    assert model.average is kept
    assert model.average.tolist() == [1, 1]


def test_large_buffers_are_put_back_when_they_were_written_to() -> None:
    model = Replacing()
    rewind = Rewind(model)
    rewind.save()
    model(torch.ones(2), writes=True)
    rewind.restore()
    assert bool(model.mask.all())
    model(torch.ones(2), writes=True)
    rewind.save()
    model.mask[1] = False
    rewind.restore()
    assert model.mask[:3].tolist() == [False, True, True]


def test_normal_numbers_that_come_in_pairs_are_put_back() -> None:
    """The second of a pair is kept outside the generator, whose memory does not change then."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    for _ in range(5):
        state = RandomState.now()
        first = random.gauss(0, 1), np.random.randn()  # noqa: NPY002
        state.restore()
        assert (random.gauss(0, 1), np.random.randn()) == first  # noqa: NPY002


def test_buffers_without_a_shape_or_for_inference_are_left_alone() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d(), Replacing())
    with torch.inference_mode():
        model[1].average = torch.zeros(2)
    rewind = Rewind(model)
    rewind.save()
    model[0](torch.ones(3, 2))
    rewind.restore()  # a shape cannot be taken back, and what was counted without one is lost
    assert isinstance(model[0], nn.BatchNorm1d)
