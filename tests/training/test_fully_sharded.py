"""Models that `fully_shard` spread over real processes, with gloo between them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from stretto.distributed.strategy import zero_gradient
from stretto.runtime.sharded import is_fully_sharded

SCRIPT = Path(__file__).with_name("fully_sharded_edges.py")

spec = importlib.util.spec_from_file_location("fully_sharded_edges", SCRIPT)
assert spec is not None
assert spec.loader is not None
edges = importlib.util.module_from_spec(spec)
spec.loader.exec_module(edges)

distributed = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]
) -> list[dict[str, Any]]:
    """What two ranks saw of all runs: starting them takes longer than the runs."""
    out = tmp_path_factory.mktemp("sharded")
    launch_ranks(SCRIPT, out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


class TestTwoRanks:
    pytestmark = distributed

    @pytest.mark.parametrize("name", edges.RUNS)
    def test_train_like_one_process(self, ranks: list[dict[str, Any]], name: str) -> None:
        """Uneven shares, empty ones, means over nothing, clipping, evaluation: one big batch's."""
        expected = edges.train(edges.model(), **edges.RUNS[name])
        assert expected["losses"]
        for rank in ranks:
            found = rank[name]
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
            assert found["weights"].keys() == expected["weights"].keys()
            for key, weight in found["weights"].items():
                assert torch.allclose(
                    torch.tensor(weight, dtype=torch.float64),
                    torch.tensor(expected["weights"][key], dtype=torch.float64),
                    rtol=0,
                    atol=1e-12,
                )
        assert ranks[0][name]["weights"] == ranks[1][name]["weights"]

    def test_write_pieces_that_tile(self, ranks: list[dict[str, Any]]) -> None:
        first, second = (rank["pieces"] for rank in ranks)
        assert first.keys() == second.keys()
        shards = [name for name, piece in first.items() if piece is not None]
        assert "head.weight" in shards
        assert "0.exp_avg" in shards
        assert first["0.step"] is second["0.step"] is None
        for name in shards:
            (dim, start, rows, length), (_, offset, _, rest) = first[name], second[name]
            assert (dim, start, offset, length + rest) == (0, 0, length, rows), name
        # The last layer has one row, which the first rank has.
        assert second["scale.weight"] == [0, 1, 1, 0]

    def test_measure_with_the_buffers_of_the_first(self, ranks: list[dict[str, Any]]) -> None:
        net = edges.model(has_statistics=True)
        found = ranks[0]["statistics"]
        net.load_state_dict(
            {
                name: torch.tensor(value, dtype=net.state_dict()[name].dtype)
                for name, value in found["weights"].items()
            }
        )
        net.eval()
        with torch.no_grad():
            expected = edges.square(net, edges.data().tensors).item()
        for rank in ranks:
            assert rank["statistics"]["measured"]["validation/loss"] == pytest.approx(expected)

    def test_leave_out_a_step_that_overflows_on_one(self, ranks: list[dict[str, Any]]) -> None:
        assert ranks[0]["scaled"] == ranks[1]["scaled"]
        assert ranks[0]["scaled"]["is_finite"]

    @pytest.mark.parametrize("name", edges.HALF)
    def test_train_in_half_precision_like_one_process(
        self, ranks: list[dict[str, Any]], name: str
    ) -> None:
        """A gradient that overflows in the rows of one rank alone is left out on both."""
        expected = edges.half(edges.model(), edges.Poison(), **edges.HALF[name])
        assert (expected["skipped"], expected["scale"]) == (1, 2.0**15)
        untouched = edges.half(edges.model(), **edges.HALF[name])
        for rank in ranks:
            found = rank["halves"][name]
            assert (found["skipped"], found["scale"]) == (1, 2.0**15)
            assert distance(found["weights"], expected["weights"]) < 2e-3
            assert distance(found["weights"], untouched["weights"]) > 1e-2

    @pytest.mark.parametrize("name", ["sharded", "replicated"])
    def test_average_weights_like_one_process_and_resume_to_the_last_bit(
        self, ranks: list[dict[str, Any]], name: str
    ) -> None:
        expected = edges.average(edges.model())
        for rank in ranks:
            found, resumed = rank["averaged"][name], rank["averaged"][f"{name}, resumed"]
            assert found["kinds"] == ["DTensor" if name == "sharded" else "Tensor"]
            assert distance(found["averages"], expected["averages"]) < 1e-12
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
            assert resumed == found

    def test_refuse_other_ways_of_sharding(self, ranks: list[dict[str, Any]]) -> None:
        refusals = ranks[0]["refusals"]
        assert refusals == ranks[1]["refusals"]
        assert "cannot train this Net: parts of it are spread over ranks" in refusals["parts"]
        assert "fully_shard left out 'scale.weight'" in refusals["left out"]
        assert "spread over 1 of 2 ranks" in refusals["half"]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two weights."""
    assert one.keys() == other.keys()
    return max(
        (torch.tensor(one[name]) - torch.tensor(other[name])).abs().max().item() for name in one
    )


@pytest.mark.parametrize("name", ["samples", "tokens", "clipped"])
def test_one_rank_trains_like_a_plain_model(name: str) -> None:
    """A process group of one: the program is the same wherever it runs."""
    expected = edges.train(edges.model(), **edges.RUNS[name])
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        found = edges.train(edges.sharded(edges.model()), **edges.RUNS[name])
    finally:
        dist.destroy_process_group()
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    for key, weight in found["weights"].items():
        assert torch.allclose(
            torch.tensor(weight), torch.tensor(expected["weights"][key]), rtol=0, atol=1e-12
        )


def test_a_gradient_of_nan_does_not_get_in() -> None:
    net = edges.model()
    with zero_gradient(net):
        loss = edges.masked_square(net, (torch.ones(2, 5).double(), torch.tensor([-100, -100])))
    (loss * 0.0).backward()
    assert loss.isnan()
    for parameter in net.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    # From here on it is a model like any other.
    edges.square(net, (torch.ones(2, 5).double(),)).backward()
    assert all(parameter.grad.abs().sum() for parameter in net.parameters())


def test_an_unused_output_gets_no_gradient() -> None:
    """All ranks must have gradients of the same parameters."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"one": self.one(inputs), "two": self.two(inputs)}

    net = Two()
    with zero_gradient(net):
        (net(torch.ones(1, 1))["one"].sum() * torch.nan).backward()
    assert net.one.weight.grad is not None
    assert net.one.weight.grad.item() == 0.0
    assert net.two.weight.grad is None


def test_other_models_are_not_fully_sharded() -> None:
    assert not is_fully_sharded(nn.Linear(1, 1))
    assert not is_fully_sharded(nn.parallel.DataParallel(nn.Linear(1, 1)))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_on_a_sharded_model_finds_what_fits_on_every_rank(
    tmp_path: Path, launch_ranks: Callable[..., Any]
) -> None:
    """The ranks run out of memory at other sizes, and none waits for another."""
    launch_ranks(SCRIPT.with_name("distributed_auto.py"), tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "barrier" in found.pop("refused")
        assert found == {"micro": 11, "is_same": True, "whole": [22], "splits": 0}
