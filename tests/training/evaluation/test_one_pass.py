from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.training.evaluation.one_pass import OnePass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = 1.0
        self.passes = 0

    def forward(self, x: Tensor, *, extra: Tensor | None = None, factor: float = 1.0) -> Any:
        self.passes += 1
        return {"out": self.layer(x) * self.scale * factor}


@pytest.fixture
def net() -> Net:
    return Net().eval()


def test_functions_share_a_pass_by_the_same_arguments_however_given(net: Net) -> None:
    x, y = torch.ones(3, 2), torch.zeros(3)
    with torch.no_grad(), OnePass(net) as one_pass:
        first = one_pass.function(lambda: net(x, extra=y, factor=float("0.5")))
        second = one_pass.function(lambda: net(x, extra=y, factor=float("0.5")))
        assert (first is second, net.passes) == (True, 1)
        one_pass.function(lambda: net(x, extra=x, factor=0.5))
        one_pass.function(lambda: net(x, extra=y, factor=0.25))
        one_pass.function(lambda: net(x))
        assert net.passes == 4


def test_a_function_that_calls_twice_gets_two_passes(net: Net) -> None:
    x = torch.ones(3, 2)
    with torch.no_grad(), OnePass(net) as one_pass:
        one_pass.function(lambda: net(x))
        outputs = one_pass.function(lambda: [net(x), net(x)])
    assert (outputs[0] is outputs[1], net.passes) == (False, 2)


@contextmanager
def scaled(net: Net) -> Iterator[None]:
    net.scale = 2.0
    yield
    net.scale = 1.0


@contextmanager
def perturbed(net: Net) -> Iterator[None]:
    net.layer.bias.add_(1)
    yield
    net.layer.bias.sub_(1)


@contextmanager
def training(net: Net) -> Iterator[None]:
    net.layer.train()
    yield
    net.layer.eval()


CHANGES: dict[str, Callable[[Net], AbstractContextManager[Any]]] = {
    "an attribute": scaled,
    "a weight": perturbed,
    "a mode": training,
    "a hook": lambda net: net.layer.register_forward_hook(lambda *_: None),
    "grad mode": lambda net: torch.enable_grad(),
    "autocast": lambda net: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_runs_again(net: Net, name: str) -> None:
    x = torch.ones(3, 2)

    def changed() -> Any:
        with CHANGES[name](net):
            return net(x)

    with torch.no_grad(), OnePass(net) as one_pass:
        first = one_pass.function(lambda: net(x))
        one_pass.function(changed)
        third = one_pass.function(lambda: net(x))
    assert net.passes == 3
    assert torch.allclose(third["out"], first["out"])


@pytest.mark.parametrize("what", ["argument", "output", "output's mapping"])
def test_a_change_in_place_runs_the_model_again(net: Net, what: str) -> None:
    x = torch.ones(3, 2)
    with torch.no_grad(), OnePass(net) as one_pass:
        first = one_pass.function(lambda: net(x))
        if what == "argument":
            x.mul_(2)
        elif what == "output":
            first["out"][0].zero_()
        else:
            first["more"] = first["out"]
        second = one_pass.function(lambda: net(x))
    assert net.passes == 2
    assert second.keys() == {"out"}
    with torch.no_grad():
        assert second["out"].equal(net(x)["out"])


@pytest.mark.parametrize("compiled", [False, "in place", "wrapped"])
def test_it_leaves_nothing_behind(net: Net, compiled: bool | str) -> None:
    model: nn.Module = net
    if compiled == "in place":
        net.compile(backend="eager")
    elif compiled:
        model = torch.compile(net, backend="eager")  # type: ignore[assignment]
    x, before = torch.ones(3, 2), dict(vars(model))
    one_pass = OnePass(model)
    with torch.no_grad(), one_pass:
        first = one_pass.function(lambda: model(x))
        assert one_pass.function(lambda: model(x)) is first
    assert vars(model).keys() == before.keys()
    assert vars(model).get("_compiled_call_impl") is before.get("_compiled_call_impl")
    assert one_pass._output is None
