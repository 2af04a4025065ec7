"""Steps that leave no trace: every bit, every object and all chance are as they were."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.errors import FitError
from stretto.memory import sandbox


class Everything(nn.Module):
    """Changes all that a forward pass can change."""

    average: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.body[0].weight  # type: ignore[assignment]
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.calls = 0
        self.seen: list[int] = []
        self.cache = {"keys": [torch.zeros(2)]}
        self.recent = deque([1, 2], maxlen=2)
        self.names = {"a"}
        self.array = np.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.cache["keys"][0] += 1
        self.cache["keys"].append(torch.ones(1))
        self.cache["values"] = [x]
        self.recent.append(self.calls)
        self.names.add(str(self.calls))
        self.array += 1
        self.late = x.detach()
        self.average = self.average * 0.9 + x.detach().mean(0)
        self.hidden.mul_(2)
        self.frozen.data = self.frozen.data + 1
        chance = torch.rand((), generator=self.generator) + self.python.random()
        result: Tensor = self.head(self.body(x)) + chance + float(self.numpy.random())
        return result


def leaves(value: Any) -> Any:
    """A copy of plain values in which all can be compared."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.detach().clone().view(-1).tolist())
    if isinstance(value, (nn.Module, Optimizer)):
        return {k: leaves(v) for k, v in vars(value).items() if k not in SKIPPED}
    if isinstance(value, dict):
        return {k if isinstance(k, str) else id(k): leaves(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [leaves(item) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return copy.copy(value) if isinstance(value, set) else value


SKIPPED = {"_forward_hooks", "_optimizer_step_pre_hooks"}


def chance() -> list[Any]:
    numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002  what libraries draw from
    return [torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:]]


def identities(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(t), t.data_ptr(), id(t.grad) if t.is_leaf else None) for t in tensors]


def train(model: nn.Module, optimizer: Optimizer, size: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(size, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    random.random()
    np.random.rand()  # noqa: NPY002
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.7
        group["new"] = 1


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "adamw fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adamw, tensor rate": lambda p: AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "in the middle of a run"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_bit_is_as_it_was(make: Callable[[Any], Optimizer], steps: int) -> None:
    torch.manual_seed(0)
    model = Everything()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        train(model, optimizer, 5)

    def everything() -> Any:
        return (leaves(model), leaves(optimizer), chance(), identities(model))

    before = everything()
    with sandbox(model, optimizer) as undo:
        assert all(p.grad is None for p in model.parameters())
        for size in (3, 7):
            train(model, optimizer, size)
        assert everything() != before
        undo()
        assert everything() == before
        model.eval()
        train(model, optimizer, 2)
    assert everything() == before


def run_of(model: nn.Module, optimizer: Optimizer) -> list[float]:
    for _ in range(3):
        train(model, optimizer, 4)
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_training_goes_on_as_if_there_had_been_no_trial() -> None:
    results = []
    for tries in (False, True):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        model = Everything()
        optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
        train(model, optimizer, 4)
        if tries:
            with sandbox(model, optimizer):
                run_of(model, optimizer)
        results.append(run_of(model, optimizer))
    assert results[0] == results[1]


def test_gradients_keep_their_values_and_identity() -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = gradient.clone()
    with sandbox(model):
        model.weight.grad = gradient
        model(torch.ones(2, 3)).sum().backward()  # adds in place to what the caller has
    assert model.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 3])).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = gradient.to_dense()
    with sandbox(model, SGD(model.parameters(), lr=0.1)):
        model(torch.tensor([0, 1, 2])).sum().backward()
        gradient.zero_()
    assert model.weight.grad is gradient
    assert torch.equal(gradient.to_dense(), before)


def test_a_scaler() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step() -> None:
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    before = scaler.state_dict()
    with sandbox(model, optimizer, scaler):
        step()
        assert scaler.get_scale() == 16
    assert scaler.state_dict() == before
    assert scaler._scale is None  # made in the first step, as in a run without trials
    step()
    scale = scaler._scale
    with sandbox(model, optimizer, scaler):
        step()
    assert scaler.get_scale() == 16
    assert scaler._scale is scale


def test_an_error_inside_passes_and_leaves_no_trace() -> None:
    model = nn.Linear(3, 1)
    optimizer = Adam(model.parameters())
    before = model.weight.clone()
    with pytest.raises(torch.OutOfMemoryError), sandbox(model, optimizer):  # noqa: PT012
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        raise torch.OutOfMemoryError("in the middle of the next step")
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert model.weight.grad is None


def test_an_optimizer_that_failed_in_the_middle_is_whole_again() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    model = nn.Sequential(first, second)
    optimizer = Adam(model.parameters())
    train_once(model, optimizer)
    before = leaves(optimizer)
    with sandbox(model, optimizer):
        state = optimizer.state[second.weight]
        del state["exp_avg"]
        state["step"] += 1
        optimizer.state.pop(first.weight)
    assert leaves(optimizer) == before
    train_once(model, optimizer)
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in optimizer.state.values())


def train_once(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_other_things_that_are_named() -> None:
    class Position:
        def __init__(self) -> None:
            self.sample, self.history = 7, [1]

        def state_dict(self) -> dict[str, Any]:
            return {"sample": self.sample, "history": self.history}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.sample, self.history = state["sample"], state["history"]

    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    position, generator = Position(), torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(data, shuffle=True, generator=generator)
    drawn: Any = np.random.RandomState(5)
    before = (generator.get_state().tolist(), drawn.get_state()[2])
    with sandbox(model, optimizer, scheduler, position, loader, drawn):
        list(loader)
        drawn.rand()
        position.sample, position.history = 9, [1, 2]
        optimizer.step()
        scheduler.step()
    assert (position.sample, position.history) == (7, [1])
    assert (generator.get_state().tolist(), drawn.get_state()[2]) == before
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_what_cannot_be_put_back_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(FitError, match="state_dict"), sandbox(model, object()):
        pass
    with pytest.raises(FitError, match="lazy"), sandbox(nn.LazyLinear(3)):
        pass


def test_models_that_are_spread_over_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        locals_before = [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]
        before = [local.clone() for local in locals_before]
        with sandbox(model):
            for local in locals_before:
                local.zero_()
        after = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    finally:
        dist.destroy_process_group()


def test_views_of_one_memory_are_kept_once() -> None:
    flat = torch.arange(6.0)
    model = nn.ParameterList([nn.Parameter(flat[:3]), nn.Parameter(flat[3:])])
    with sandbox(model):
        flat.zero_()
        model[0].data = torch.ones(3)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert model[0].data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_of_every_kind(dtype: torch.dtype) -> None:
    tensor = torch.rand(4, 6).mul(2).to(dtype)
    views = [tensor, tensor.t(), tensor[1:3, ::2], torch.empty(0), torch.empty(3, device="meta")]
    before = tensor.clone()
    with sandbox({"views": views}) as undo:
        for _ in range(2):
            tensor.zero_()
            undo()
            assert torch.equal(tensor, before)
