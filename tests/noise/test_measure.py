"""Gradients of micro-batches, measured while they are added up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.noise import MicroGradients
from stretto.noise.norms import Norms, read_squares


def square_norm(tensors: list[torch.Tensor]) -> float:
    norms = Norms()
    norms.add(tensors)
    (square,) = read_squares([norms])
    return square


def test_a_large_norm_is_as_good_as_one_in_double_precision() -> None:
    gradient = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) + 1.0
    exact = float(gradient.double().square().sum())
    assert (square_norm([gradient])) == pytest.approx(exact, rel=1e-6)
    assert (square_norm([gradient.reshape(1000, 3000).T])) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_every_type(dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (3, 90)
    ]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert (square_norm(tensors)) == pytest.approx(exact, rel=1e-5)


def test_norms_of_mixed_and_strange_tensors() -> None:
    places, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 1.0])
    sparse = torch.sparse_coo_tensor(places, values, (4,), check_invariants=True)
    strange = [sparse, torch.tensor([3 + 4j]), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)]
    assert (square_norm(strange)) == pytest.approx(9 + 25 + 2)
    assert (square_norm([])) == 0


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_what_is_added_up_is_what_accumulating_gives(sparse: bool) -> None:
    torch.manual_seed(0)
    table, unused = nn.Embedding(6, 3, sparse=sparse), nn.Linear(1, 1)
    batches = torch.randint(0, 6, (3, 5))
    alone = []
    for batch in batches:
        table.zero_grad()
        table(batch).sin().sum().backward()
        gradient = table.weight.grad
        assert gradient is not None
        alone.append(float(gradient.to_dense().square().sum()))
    table.zero_grad()
    for batch in batches:
        table(batch).sin().sum().backward()
    assert table.weight.grad is not None
    expected = table.weight.grad.to_dense().clone()
    table.zero_grad()
    twice = [*table.parameters(), *table.parameters()]
    gradients = MicroGradients([*twice, *unused.parameters()])
    gradients.begin()
    for number, batch in enumerate(batches):
        with gradients.watch(is_last=number == 2):
            table(batch).sin().sum().backward()
    assert torch.equal(table.weight.grad.to_dense(), expected)
    *parts, whole = gradients.read()
    assert parts == pytest.approx(alone)
    assert whole == pytest.approx(float(expected.square().sum()))
    assert unused.weight.grad is None
