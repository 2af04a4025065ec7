from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from stretto.checkpoint import read_checkpoint, write_checkpoint
from stretto.checkpoint.parts import DTYPES, write_tensors
from stretto.errors import CheckpointError

shapes = st.lists(st.integers(0, 3), max_size=3)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any type, in any order in memory."""
    dtype = draw(st.sampled_from(sorted(DTYPES.values(), key=str)))
    shape = draw(shapes)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        whole = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        whole = whole.to(torch.bool)
    else:
        size = count * dtype.itemsize
        content = draw(st.binary(min_size=size, max_size=size))
        whole = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
    whole = whole.reshape(shape)
    return whole.mT if whole.dim() >= 2 and draw(st.booleans()) else whole


def is_utf8(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


@given(st.dictionaries(st.text(min_size=1).filter(is_utf8), tensors()))
def test_any_tensors_come_back_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, named: dict[str, torch.Tensor]
) -> None:
    named.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("any") / "a"
    write_checkpoint(path, {"model": named}, {})
    found = read_checkpoint(path).tensors["model"]
    assert found.keys() == named.keys()
    for name, tensor in named.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def test_the_library_reads_it_and_each_tensor_is_aligned(tmp_path: Path) -> None:
    named = {
        "byte": torch.ones(3, dtype=torch.uint8),
        "double": torch.arange(3, dtype=torch.float64),
        "half": torch.ones(1, dtype=torch.bfloat16),
        "é\n": torch.tensor(True),
    }
    written = write_tensors(tmp_path / "a", named)
    content = (tmp_path / "a").read_bytes()
    assert written == (len(content), hashlib.sha256(content).hexdigest())
    assert int.from_bytes(content[:8], "little") % 8 == 0
    found = load_file(tmp_path / "a")
    assert found.keys() == named.keys()
    for name, tensor in named.items():
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % tensor.itemsize == 0
    with safe_open(tmp_path / "a", framework="pt") as opened:
        assert opened.offset_keys() == ["double", "half", "byte", "é\n"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "a", {})
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("x", torch.ones(1, dtype=torch.complex128), "has no torch.complex128"),
        ("__metadata__", torch.ones(1), "cannot hold that name"),
        ("\ud800", torch.ones(1), "cannot hold that name"),
    ],
    ids=["type", "reserved", "half a letter"],
)
def test_what_the_format_cannot_hold_is_refused(
    name: str, tensor: torch.Tensor, why: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=why):
        write_checkpoint(tmp_path / "a", {"model": {name: tensor}}, {})
    assert list(tmp_path.iterdir()) == []
