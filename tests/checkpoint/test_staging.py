from __future__ import annotations

import pytest
import torch

from stretto.checkpoint import Shard
from stretto.checkpoint.sharding import HostCopies
from stretto.errors import CheckpointError


def test_what_was_taken_does_not_change_with_the_run() -> None:
    weight = torch.ones(2, 3)
    staged = HostCopies().take({"model": {"weight": weight, "turned": weight.t()}})
    weight.zero_()
    assert bool(staged.tensors["model"]["weight"].all())  # type: ignore[union-attr]
    turned = staged.tensors["model"]["turned"]
    assert isinstance(turned, torch.Tensor)
    assert turned.shape == (3, 2)
    assert turned.is_contiguous()


def test_buffers_are_used_again_where_they_fit() -> None:
    copies = HostCopies()
    tensors = {"model": {"a": torch.ones(2), "b": torch.ones(3)}}
    first = copies.take(tensors).tensors["model"]
    tensors["model"]["b"] = torch.ones(3, dtype=torch.float64)
    second = copies.take(tensors).tensors["model"]
    assert second["a"] is first["a"]
    assert second["b"] is not first["b"]
    assert second["b"].dtype == torch.float64  # type: ignore[union-attr]


def test_memory_that_is_no_longer_wanted_is_given_back() -> None:
    copies = HostCopies()
    copies.take({"model": {"a": torch.ones(2), "b": torch.ones(3)}})
    copies.take({"model": {"a": torch.ones(2)}})
    assert set(copies._buffers) == {("model", "a")}


def test_memory_that_is_shared_is_copied_once() -> None:
    weight = torch.ones(4)
    tensors = {
        "model": {"a": weight, "b": weight, "view": weight[:2], "other": torch.ones(4)},
        "average": {"a": weight},
    }
    staged = HostCopies().take(tensors)
    assert staged.aliases == {"model": {"b": "a"}, "average": {}}
    assert set(staged.tensors["model"]) == {"a", "view", "other"}
    assert staged.tensors["average"]["a"] is staged.tensors["model"]["a"]


def test_views_that_show_other_values_are_no_aliases() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    real = torch.view_as_real(values)
    tensors = {"model": {"plain": values, "conjugate": values.conj(), "bits": real}}
    staged = HostCopies().take(tensors)
    assert staged.aliases == {"model": {}}
    assert torch.equal(staged.tensors["model"]["conjugate"], values.conj().resolve_conj())  # type: ignore[arg-type]


def test_parts_that_lie_in_other_places_are_no_aliases() -> None:
    local = torch.ones(2)
    parts = {
        "a": Shard(local, (4,), (0,)),
        "b": Shard(local, (4,), (2,)),
        "c": Shard(local, (4,), (0,)),
    }
    staged = HostCopies().take({"model": parts})
    assert staged.aliases == {"model": {"c": "a"}}
    taken = staged.tensors["model"]["b"]
    assert isinstance(taken, Shard)
    assert taken[1:] == ((4,), (2,))
    assert taken.local is not local


def test_empty_tensors_are_no_aliases() -> None:
    staged = HostCopies().take({"model": {"a": torch.empty(0, 2), "b": torch.empty(0, 2)}})
    assert staged.aliases == {"model": {}}
    assert len(staged.tensors["model"]) == 2


def test_a_parameter_is_copied_without_its_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    staged = HostCopies().take({"model": {"weight": weight, "twice": weight * 2}})
    for tensor in staged.tensors["model"].values():
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_what_has_no_plain_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="sparse"):
        HostCopies().take({"model": {"x": tensor}})


@pytest.mark.gpu
def test_copies_of_an_accelerator_are_done_when_they_are_returned() -> None:
    copies = HostCopies()
    weight = torch.arange(1 << 20, device="cuda")
    for step in range(3):
        taken = copies.take({"model": {"weight": weight}}).tensors["model"]["weight"]
        assert isinstance(taken, torch.Tensor)
        assert torch.equal(taken, torch.arange(1 << 20) + step)
        weight += 1


@pytest.mark.phantom
def test_copies_of_an_accelerator_are_pinned_and_used_again() -> None:
    if not torch.empty(1, pin_memory=True).is_pinned():
        pytest.skip("this phantom does not know pinned memory")
    copies = HostCopies()
    weight = torch.zeros(4, 8, device="cuda")
    tensors = {"model": {"weight": weight, "turned": weight.t()}}
    first = copies.take(tensors).tensors["model"]
    for one in first.values():
        assert isinstance(one, torch.Tensor)
        assert one.is_pinned()
        assert one.is_contiguous()
    assert copies.take(tensors).tensors["model"]["weight"] is first["weight"]
