"""Gradients of micro-batches, measured while they are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from stretto.runtime.micro_gradients import MicroGradients, Norms, read_squares

DataParallel = Callable[[nn.Module], nn.parallel.DistributedDataParallel]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_a_large_norm_of_another_type_is_as_good(dtype: torch.dtype) -> None:
    gradient = torch.ones(20_000_000, dtype=dtype)
    assert square_norm([gradient]) == pytest.approx(20e6, rel=1e-6)


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


class Mixed(nn.Module):
    """Rows of a table, times weights of a sort: of one type, or laid out in one way."""

    def __init__(self, sort: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        drawn = torch.randn(4, 6, dtype=torch.complex64 if sort == "complex" else torch.float32)
        wide = drawn[:3, :4]
        wide = wide if sort == "gaps" else wide.contiguous()
        wide = wide.T.contiguous().T if sort in ("columns", "complex") else wide
        self.wide = nn.Parameter(wide)
        self.other = nn.Parameter(drawn[3, :4].clone())
        self.table = nn.Embedding(6, 3, sparse=sort == "sparse")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.table(batch).to(self.wide.dtype) @ self.wide @ self.other).abs().sum()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one: torch calls the hook there as anywhere."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()]
    return [gradient.to_dense().clone() for gradient in found if gradient is not None]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("part", ["all", "some"])
@pytest.mark.parametrize("sort", ["rows", "columns", "gaps", "sparse", "complex"])
def test_what_ranks_average_is_what_they_would_without_it(
    sort: str, part: str, data_parallel: DataParallel
) -> None:
    batches = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(1))
    plain = data_parallel(Mixed(sort))
    alone = []
    for batch in batches:
        plain.zero_grad()
        plain(batch).backward()
        alone.append(gradients_of(plain))
    plain.zero_grad()
    for number, batch in enumerate(batches):
        with plain.no_sync() if number < 2 else nullcontext():
            plain(batch).backward()
    model = data_parallel(Mixed(sort))
    own = list(model.parameters())[0 if part == "all" else 1 :]
    gradients = MicroGradients(own)
    gradients.attach(model)
    gradients.begin()
    for number, batch in enumerate(batches):
        is_last = number == 2
        with (
            nullcontext() if is_last else model.no_sync(),
            gradients.watch(is_last=is_last, is_averaged=is_last),
        ):
            model(batch).backward()
    pairs = zip(gradients_of(model), gradients_of(plain), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    whole, *parts = (
        sum(float(one.abs().square().sum()) for one in each[-len(own) :])
        for each in (gradients_of(plain), *alone)
    )
    assert gradients.read() == pytest.approx([*parts, whole], rel=1e-5)


class Branches(nn.Module):
    """A pass goes through one of two layers, and leaves the other without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.last(self.layers[number](batch)).square().sum()


def train_branches(
    passes: Sequence[int], *, measures: bool, as_view: bool, to_none: bool
) -> list[torch.Tensor]:
    model = nn.parallel.DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradients = MicroGradients(model.parameters())
    if measures:
        gradients.attach(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        if measures:
            gradients.begin()
        for place, number in enumerate(passes, 1):
            is_last = place == len(passes)
            watch = gradients.watch(is_last=is_last, is_averaged=is_last)
            with (
                nullcontext() if is_last else model.no_sync(),
                watch if measures else nullcontext(),
            ):
                model(torch.randn(5, 4, generator=generator), number).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("passes", [(0, 0), (0, 1), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_any_loop_with_any_wrapper_has_the_gradients_it_would_have(
    passes: Sequence[int], as_view: bool, to_none: bool
) -> None:
    plain = train_branches(passes, measures=False, as_view=as_view, to_none=to_none)
    measured = train_branches(passes, measures=True, as_view=as_view, to_none=to_none)
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))


@pytest.mark.usefixtures("group")
def test_of_a_pass_that_fails_nothing_stays() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    gradients = MicroGradients(model.parameters())
    gradients.attach(model)
    gradients.begin()
    with model.no_sync(), gradients.watch(is_last=False):
        model(torch.ones(2, 3)).sum().backward()
    with (
        pytest.raises(KeyboardInterrupt),
        gradients.watch(is_last=True, is_averaged=True),
    ):
        raise KeyboardInterrupt
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()  # of a step that is not measured
    assert torch.equal(model.module.weight.grad, torch.full((1, 3), 2.0))
