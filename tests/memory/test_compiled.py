"""Steps that `torch.compile` has compiled: they are looked at as they are, in one piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.memory import predict, probe
from stretto.memory.measuring.real import record_step
from stretto.memory.prediction.modules import compiled_modules
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, from inside its compiler

GRAPHS: list[torch.fx.GraphModule] = []
"""What the backend below was asked to compile."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def compiled_step(what: str, backend: Any) -> SupervisedStep:
    """Return a step of which something is compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net()
    model: Any = net
    function: Callable[..., Any] = loss
    if what == "the model":
        model = torch.compile(net, backend=backend, dynamic=True)
    elif what == "the model in place":
        net.compile(backend=backend, dynamic=True)
    elif what == "its blocks":
        for block in net.blocks:
            block.compile(backend=backend, dynamic=True)
    else:
        function = torch.compile(loss, backend=backend, dynamic=True)
    return SupervisedStep(model, torch.optim.AdamW(model.parameters()), function)


def make_batch(size: int) -> Tensor:
    return torch.randn(size, 64)


def count(graph: torch.fx.GraphModule, _: Any) -> Any:
    GRAPHS.append(graph)
    return graph.forward


WHAT = ("the model", "the model in place", "its blocks", "the loss")


@pytest.mark.parametrize("what", WHAT)
def test_what_is_compiled_stays_in_one_piece(what: str) -> None:
    GRAPHS.clear()
    step = compiled_step(what, count)
    for size in (2, 3):
        record_step(step, make_batch(size), size)
    each = [
        sum(node.target is torch._C._nn.linear for node in graph.graph.nodes) for graph in GRAPHS
    ]
    assert set(each) == ({2} if what == "its blocks" else {4})  # whole, however often
    assert len(each) <= 2
    GRAPHS.clear()
    WholeStep.of(step).run(make_batch(7))
    # What was compiled serves the run; a function that calls modules with hooks does not.
    assert len(GRAPHS) == (what == "the loss")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["its blocks", "the loss"])
def test_a_probe_of_compiled_code_is_right(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # compiled here, not found
    step = compiled_step(what, "inductor")
    probed = probe(step, make_batch)
    for size in (9, 40, 500):
        real = record_step(step, make_batch(size), size).peak
        assert probed.at(size).bytes == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("what", WHAT)
def test_a_prediction_says_that_it_takes_compiled_code_for_plain(what: str) -> None:
    found = predict(compiled_step(what, "eager"), make_batch)
    assert (found.certainty_if_verified, "compiled" in found.reason) == ("upper bound", True)


def test_a_step_that_compiles_its_model_says_so() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    found = predict(SupervisedStep(net, optimizer, loss, compile=True), make_batch)
    assert (found.certainty_if_verified, "compiled" in found.reason) == ("upper bound", True)


def test_which_modules_are_compiled() -> None:
    nets = [Net(), Net()]
    model: Any = nn.Sequential(*nets)
    assert not compiled_modules(model)
    nets[0].blocks[0].compile(backend="eager")
    assert compiled_modules(model) == set(nets[0].blocks[0].modules())
    whole: Any = torch.compile(model, backend="eager")
    assert compiled_modules(whole) == set(model.modules())
