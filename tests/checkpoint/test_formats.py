"""Weights in other formats: equal bit by bit, whoever wrote and reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stretto.checkpoint import Shard, checkpoint_path, export_weights, write_checkpoint
from stretto.checkpoint.formats import load_dcp_weights
from stretto.checkpoint.sharding import HostCopies
from stretto.checkpoint.writing import begin_checkpoint, finish_checkpoint, write_part
from stretto.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def saved(folder: Path, model: nn.Module) -> Path:
    path = checkpoint_path(folder, 8)
    write_checkpoint(path, {"model": model.state_dict()}, {})
    return path


def written_by_ranks(folder: Path, whole: Tensor, ranks: int) -> Path:
    path = checkpoint_path(folder, 8)
    begin_checkpoint(path)
    size = -(-len(whole) // ranks)
    for rank in range(ranks):
        local = whole[rank * size : (rank + 1) * size].clone()
        shard = Shard(local, tuple(whole.shape), (min(rank * size, len(whole)), 0))
        plain: dict[str, dict[str, Tensor | Shard]] = {
            "model": {"plain": torch.ones(2), "weight": shard, "tied": shard}
        }
        write_part(path, HostCopies().take(plain), rank=rank, world_size=ranks)
    finish_checkpoint(path, {}, world_size=ranks)
    return path


def same(found: dict[str, Tensor], model: nn.Module) -> bool:
    expected = model.state_dict()
    return all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
        if name in found
    )


def test_one_file_for_hugging_face(tmp_path: Path) -> None:
    model = Tied()
    export_weights(saved(tmp_path, model), tmp_path / "hf", "hf")
    assert [file.name for file in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(found) == set(model.state_dict()) - {"head.weight"}
    assert same(found, model)
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    whole = torch.randn(11, 3)
    path = written_by_ranks(tmp_path, whole, ranks=3)
    export_weights(path, tmp_path / "hf", "hf", shard_bytes=100)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == whole.nbytes + 8
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    file = index["weight_map"]["weight"]
    assert torch.equal(load_file(tmp_path / "hf" / file)["weight"], whole)


@pytest.mark.parametrize("tie", [False, True])
def test_transformers_reads_it(tmp_path: Path, tie: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
    )
    model = transformers.LlamaForCausalLM(config)
    path = saved(tmp_path, model)
    for number, shard_bytes in enumerate((10**9, 20_000)):
        folder = tmp_path / f"hf{number}"
        export_weights(path, folder, "hf", shard_bytes=shard_bytes)
        config.save_pretrained(folder)
        found, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert found.state_dict().keys() == model.state_dict().keys()
        assert same(found.state_dict(), model)
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == tie


@pytest.mark.filterwarnings("ignore")
def test_dcp_there_and_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    export_weights(saved(tmp_path, model), tmp_path / "dcp", "dcp")
    state = {"model": {name: torch.zeros_like(one) for name, one in other.state_dict().items()}}
    load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(state["model"], model)
    assert load_dcp_weights(other, tmp_path / "dcp") == ()
    assert same(other.state_dict(), model)
    assert other.head.weight is other.embedding.weight


@pytest.mark.filterwarnings("ignore")
def test_what_several_ranks_wrote_becomes_one_dcp(tmp_path: Path) -> None:
    whole = torch.randn(11, 3)
    export_weights(written_by_ranks(tmp_path, whole, ranks=4), tmp_path / "dcp", "dcp")
    model = nn.Module()
    for name in ("weight", "tied"):
        model.register_buffer(name, torch.zeros(11, 3))
    assert load_dcp_weights(model, tmp_path / "dcp") == ("model.plain",)
    assert torch.equal(model.weight, whole)  # type: ignore[arg-type]
    assert torch.equal(model.tied, whole)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(nn.Linear(3, 2).state_dict(), checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for model in (nn.Linear(3, 2).double(), nn.Linear(2, 2), nn.Bilinear(3, 3, 2), Tied()):
        with pytest.raises(CheckpointError, match="model"):
            load_dcp_weights(model, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="folder"):
        load_dcp_weights(nn.Linear(3, 2), tmp_path / "nothing")
    export_weights(saved(tmp_path, nn.Linear(1, 1)), tmp_path / "hf", "hf")
    for folder, to in (("hf", "hf"), ("new", "onnx")):
        with pytest.raises(CheckpointError, match="write"):
            export_weights(checkpoint_path(tmp_path, 8), tmp_path / folder, to)
